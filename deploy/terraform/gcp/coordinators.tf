# Two, each in a zone of its own. Nothing is kept on their disks: the ledger is in Postgres, objects are in the bucket.

# An address that outlives the instance: workers and certificates know it.
resource "google_compute_address" "coordinator" {
  count        = 2
  name         = "${var.name}-coordinator-${count.index}"
  address_type = "INTERNAL"
  subnetwork   = var.subnetwork
}

locals {
  coordinators = [for one in google_compute_address.coordinator : one.address]
  fetch        = "gcloud --quiet --project ${var.project} secrets versions access latest --secret"
  cloud_toml = templatefile("${path.module}/cloud.toml.tftpl", {
    project      = var.project
    bucket       = google_storage_bucket.objects.name
    prefix       = var.prefix
    topic        = google_pubsub_topic.input.name
    subscription = google_pubsub_subscription.input.name
    output_topic = google_pubsub_topic.output.name
    secrets      = var.secrets
  })
  coordinator_toml = templatefile("${path.module}/../coordinator.toml.tftpl", {
    addresses = local.coordinators
    cloud     = local.cloud_toml
  })
}

resource "google_compute_instance" "coordinator" {
  count                     = 2
  name                      = "${var.name}-coordinator-${count.index}"
  zone                      = var.coordinator_zones[count.index]
  machine_type              = var.coordinator_machine_type
  tags                      = ["${var.name}-coordinator"]
  allow_stopping_for_update = true

  boot_disk {
    initialize_params {
      image = var.coordinator_image
      size  = 20
    }
  }
  network_interface {
    subnetwork = var.subnetwork
    network_ip = google_compute_address.coordinator[count.index].address
  }
  service_account {
    email  = google_service_account.instance["coordinator"].email
    scopes = ["cloud-platform"]
  }
  shielded_instance_config {
    enable_secure_boot = true
  }
  metadata = {
    enable-oslogin = "TRUE"
    startup-script = templatefile("${path.module}/../boot.sh.tftpl", {
      program  = "rollout-coordinator"
      package  = var.package
      toml     = local.coordinator_toml
      unit     = file("${path.module}/../../systemd/rollout-coordinator.service")
      drain_s  = 15
      fetch    = local.fetch
      address  = local.coordinators[count.index]
      url      = var.postgres_url_secret
      identity = var.authority_secret
      join     = []
    })
  }
}
