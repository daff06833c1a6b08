output "coordinator_toml" {
  description = "coordinator.toml of both coordinators; advertise_addr is each one's own, in its environment."
  value       = local.coordinator_toml
}

output "worker_toml" {
  description = "worker.toml, for workers that are started elsewhere."
  value       = local.worker_toml
}

output "cloud_toml" {
  description = "[cloud] for a laptop's batch.toml, map.toml or train.toml."
  value       = local.cloud_toml
}

output "coordinator_addrs" {
  description = "What `rollout join --coordinator` dials, with the port 50052."
  value       = [for address in local.coordinators : "${address}:50052"]
}

output "service_accounts" {
  description = "Of coordinators and workers; pods of GKE act as these (deploy/kubernetes/gke)."
  value       = { for role, account in google_service_account.instance : role => account.email }
}

output "dead_letters" {
  description = "Subscription of messages that could not be delivered."
  value       = google_pubsub_subscription.dead.name
}
