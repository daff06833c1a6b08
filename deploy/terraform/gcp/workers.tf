locals {
  worker_toml = templatefile("${path.module}/../worker.toml.tftpl", {
    addresses      = local.coordinators
    cloud          = local.cloud_toml
    compute        = "gce"
    drain_budget_s = var.drain_budget_s
    secrets        = var.secrets
    secret_store   = "gcp"
  })
}

resource "google_compute_region_instance_template" "worker" {
  name_prefix  = "${var.name}-worker-"
  region       = var.region
  machine_type = var.worker_machine_type
  tags         = ["${var.name}-worker"]

  scheduling {
    provisioning_model          = "SPOT"
    preemptible                 = true
    automatic_restart           = false
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = "STOP"
  }
  disk {
    source_image = var.worker_image
    boot         = true
    disk_type    = "pd-balanced"
    disk_size_gb = var.worker_disk_gib
  }
  network_interface {
    subnetwork = var.subnetwork
  }
  service_account {
    email  = google_service_account.instance["worker"].email
    scopes = ["cloud-platform"]
  }
  metadata = {
    enable-oslogin = "TRUE"
    startup-script = templatefile("${path.module}/../boot.sh.tftpl", {
      program  = "rollout-worker"
      package  = var.worker_package
      toml     = local.worker_toml
      unit     = file("${path.module}/../../systemd/rollout-worker.service")
      drain_s  = var.drain_budget_s + 10
      fetch    = local.fetch
      address  = ""
      url      = ""
      identity = var.worker_token_secret
      join     = local.coordinators
    })
    # Returns when the worker has drained. The worker reads the notice itself as well; the first of the two counts.
    shutdown-script = "#!/bin/sh\nsystemctl stop rollout-worker.service\n"
  }
  lifecycle {
    create_before_destroy = true
  }
}

# Spot machines. One that is preempted is made anew when there is capacity.
resource "google_compute_region_instance_group_manager" "workers" {
  name                             = "${var.name}-workers"
  base_instance_name               = "${var.name}-worker"
  region                           = var.region
  distribution_policy_zones        = var.worker_zones
  distribution_policy_target_shape = "ANY"
  target_size                      = var.workers

  version {
    instance_template = google_compute_region_instance_template.worker.id
  }
  update_policy {
    type                         = "PROACTIVE"
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = max(length(var.worker_zones), ceil(var.workers / 4))
  }
}
