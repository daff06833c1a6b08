# Rows are published to `input`. What cannot be delivered is kept for a week in the subscription `dead`.
resource "google_pubsub_topic" "input" {
  name = "${var.name}-input"
}

resource "google_pubsub_topic" "dead" {
  name = "${var.name}-dead"
}

resource "google_pubsub_topic" "output" {
  name = "${var.name}-output"
}

resource "google_pubsub_subscription" "input" {
  name                       = "${var.name}-input"
  topic                      = google_pubsub_topic.input.id
  ack_deadline_seconds       = 60
  message_retention_duration = "604800s"
  expiration_policy {
    ttl = ""
  }
  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.dead.id
    max_delivery_attempts = var.max_deliveries
  }
  retry_policy {
    minimum_backoff = "1s"
    maximum_backoff = "60s"
  }
}

resource "google_pubsub_subscription" "dead" {
  name                       = "${var.name}-dead"
  topic                      = google_pubsub_topic.dead.id
  message_retention_duration = "604800s"
  expiration_policy {
    ttl = ""
  }
}

resource "google_pubsub_subscription" "output" {
  name                       = "${var.name}-output"
  topic                      = google_pubsub_topic.output.id
  message_retention_duration = "604800s"
  expiration_policy {
    ttl = ""
  }
}

# Pub/Sub itself moves dead letters, and may do so only if it is let.
locals {
  pubsub_agent = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}

resource "google_pubsub_topic_iam_member" "dead" {
  topic  = google_pubsub_topic.dead.name
  role   = "roles/pubsub.publisher"
  member = local.pubsub_agent
}

resource "google_pubsub_subscription_iam_member" "dead" {
  subscription = google_pubsub_subscription.input.name
  role         = "roles/pubsub.subscriber"
  member       = local.pubsub_agent
}
