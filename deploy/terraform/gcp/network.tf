# Calls, joining, and bulk bytes: [transport] listen_addr, join_addr and [objects] listen_addr.
resource "google_compute_firewall" "workers" {
  name        = "${var.name}-workers"
  network     = var.network
  target_tags = ["${var.name}-coordinator"]
  source_tags = ["${var.name}-worker", "${var.name}-coordinator"]
  allow {
    protocol = "tcp"
    ports    = ["50051-50053"]
  }
}

resource "google_compute_firewall" "clients" {
  count         = length(var.client_cidrs) > 0 ? 1 : 0
  name          = "${var.name}-clients"
  network       = var.network
  target_tags   = ["${var.name}-coordinator"]
  source_ranges = var.client_cidrs
  allow {
    protocol = "tcp"
    ports    = ["50051-50053"]
  }
}
