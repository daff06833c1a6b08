module "permissions" {
  source   = "../permissions"
  for_each = toset(["coordinator", "worker", "laptop", "operator"])
  cloud    = "gcp"
  role     = each.key
}

resource "google_service_account" "instance" {
  for_each     = toset(["coordinator", "worker"])
  account_id   = "${var.name}-${each.key}"
  display_name = "Rollout ${each.key}"
}

locals {
  # One custom role for each role and kind of resource, granted on the resource, never on the project.
  roles = merge([
    for role, one in module.permissions : {
      for on, permissions in one.permissions :
      "${role}_${on}" => { role = role, on = on, permissions = permissions }
    }
  ]...)
  members = {
    coordinator = [google_service_account.instance["coordinator"].member]
    worker      = [google_service_account.instance["worker"].member]
    laptop      = lookup(var.people, "laptop", [])
    operator    = lookup(var.people, "operator", [])
  }
  names = {
    bucket       = [google_storage_bucket.objects.name]
    data_buckets = var.data_buckets
    subscription = [google_pubsub_subscription.input.name]
    topic        = [google_pubsub_topic.input.name]
    output_topic = [google_pubsub_topic.output.name]
    secrets      = var.secrets
  }
  boot_names = {
    coordinator = [var.postgres_url_secret, var.authority_secret]
    worker      = [var.worker_token_secret]
  }
  # Who gets which role on what.
  grants = merge(flatten([
    for key, role in local.roles : [
      for name in role.on == "boot_secrets" ? local.boot_names[role.role] : local.names[role.on] : [
        for number, member in local.members[role.role] : {
          "${key} ${name} ${number}" = { key = key, kind = role.on, name = name, member = member }
        }
      ]
    ]
  ])...)
}

resource "google_project_iam_custom_role" "this" {
  for_each    = local.roles
  role_id     = "${replace(var.name, "-", "_")}_${each.key}"
  title       = "Rollout ${each.value.role} on ${each.value.on}"
  permissions = each.value.permissions
}

resource "google_storage_bucket_iam_member" "this" {
  for_each = { for key, grant in local.grants : key => grant if contains(["bucket", "data_buckets"], grant.kind) }
  bucket   = each.value.name
  role     = google_project_iam_custom_role.this[each.value.key].id
  member   = each.value.member
}

resource "google_pubsub_subscription_iam_member" "this" {
  for_each     = { for key, grant in local.grants : key => grant if grant.kind == "subscription" }
  subscription = each.value.name
  role         = google_project_iam_custom_role.this[each.value.key].id
  member       = each.value.member
}

resource "google_pubsub_topic_iam_member" "this" {
  for_each = { for key, grant in local.grants : key => grant if contains(["topic", "output_topic"], grant.kind) }
  topic    = each.value.name
  role     = google_project_iam_custom_role.this[each.value.key].id
  member   = each.value.member
}

resource "google_secret_manager_secret_iam_member" "this" {
  for_each  = { for key, grant in local.grants : key => grant if contains(["secrets", "boot_secrets"], grant.kind) }
  secret_id = each.value.name
  role      = google_project_iam_custom_role.this[each.value.key].id
  member    = each.value.member
}
