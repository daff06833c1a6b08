variable "name" {
  type        = string
  description = "Of this installation; begins the name of everything in it."
  default     = "rollout"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,15}$", var.name))
    error_message = "Lower-case letters, digits and hyphens, 16 at most: account names are short."
  }
}

variable "project" {
  type        = string
  description = "Of everything here."
}

variable "region" {
  type        = string
  description = "Of everything here. Keep the workers where the bucket is: traffic between regions costs."
}

variable "coordinator_zones" {
  type        = list(string)
  description = "Two zones of the region; one coordinator is in each."
  validation {
    condition     = length(var.coordinator_zones) == 2
    error_message = "Name two zones: one coordinator is in each."
  }
}

variable "worker_zones" {
  type        = list(string)
  description = "Zones of the workers, which have the wanted GPU. Traffic between zones costs."
}

variable "network" {
  type        = string
  description = "Name of the network."
  default     = "default"
}

variable "subnetwork" {
  type        = string
  description = "Name of the region's subnetwork, with Private Google Access or a NAT: instances have no public address."
  default     = "default"
}

variable "client_cidrs" {
  type        = list(string)
  description = "From where people submit runs. Their calls are mutual TLS; still, name your network, not everyone's."
  default     = []
}

variable "bucket" {
  type        = string
  description = "Name of the bucket to make: objects of runs. Names are unique in the world."
}

variable "prefix" {
  type        = string
  description = "Put before every key; empty, or ends in a slash."
  default     = ""
  validation {
    condition     = var.prefix == "" || endswith(var.prefix, "/")
    error_message = "End it in a slash."
  }
}

variable "data_buckets" {
  type        = list(string)
  description = "Names of buckets whose gs:// URLs inputs, outputs, models and data sets name. Laptops may read and write them; workers need nothing of a bucket."
  default     = []
}

variable "max_deliveries" {
  type        = number
  description = "A message that was delivered so often goes to the dead letter topic: 5 to 100."
  default     = 10
}

variable "secrets" {
  type        = list(string)
  description = "Names of secrets that workers may read: [cloud.secrets] allowlist."
  default     = []
}

variable "people" {
  type        = map(list(string))
  description = "Who has the roles laptop and operator, as in { laptop = [\"group:research@example.com\"] }."
  default     = {}
}

variable "postgres_url_secret" {
  type        = string
  description = "Name of a secret in Secret Manager whose value is the database's URL: postgresql://rollout:...@host:5432/rollout. Cloud SQL for PostgreSQL 15 or newer with a private address."
}

variable "authority_secret" {
  type        = string
  description = "Name of a secret whose value is JSON with ca.pem and ca.key.pem, of `rollout-coordinator authority`."
}

variable "worker_token_secret" {
  type        = string
  description = "Name of a secret whose value is a token of `rollout-coordinator token create --role worker --ttl 30d --uses 10000`; make another before it ends."
}

variable "package" {
  type        = string
  description = "What pip installs on coordinators. Until rollout-engine is published, the URL of a wheel of yours: rollout-engine[gcp] @ https://..."
  default     = "rollout-engine[gcp]"
}

variable "worker_package" {
  type        = string
  description = "What pip installs on workers, with the extras of their engine. Until rollout-engine is published, the URL of a wheel of yours: rollout-engine[gcp,vllm,nvml] @ https://..."
  default     = "rollout-engine[gcp,vllm,nvml]"
}

variable "coordinator_image" {
  type        = string
  description = "Image of the coordinators: Debian or Ubuntu with Python 3.11 or newer, its venv and gcloud."
  default     = "debian-cloud/debian-12"
}

variable "coordinator_machine_type" {
  type        = string
  description = "Two cores and 8 GiB serve some 600 busy workers."
  default     = "n2-standard-2"
}

variable "worker_image" {
  type        = string
  description = "Image of the workers: as the coordinators', with the GPU's driver."
}

variable "worker_machine_type" {
  type        = string
  description = "Of the workers; the g2 and a2 families bring their GPU."
  default     = "g2-standard-8"
}

variable "workers" {
  type        = number
  description = "How many to keep."
  default     = 0
}

variable "worker_disk_gib" {
  type        = number
  description = "Disk of a worker: models and the cache of objects."
  default     = 200
}

variable "drain_budget_s" {
  type        = number
  description = "Seconds that running items get after SIGTERM (the shutdown script sends it) or an operator's drain. A preemption notice has its own: 15 s, or half of what Google leaves."
  default     = 15
  validation {
    condition     = var.drain_budget_s <= 20
    error_message = "Google gives 30 s, of which uploading the last results takes some: 20 at most."
  }
}
