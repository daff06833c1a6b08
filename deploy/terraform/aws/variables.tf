variable "name" {
  type        = string
  description = "Of this installation; begins the name of everything in it."
  default     = "rollout"
}

variable "region" {
  type        = string
  description = "Of everything here. Keep the workers where the bucket is: traffic between regions costs."
}

variable "vpc_id" {
  type        = string
  description = "The network that coordinators and workers are in."
}

variable "coordinator_subnets" {
  type        = list(string)
  description = "Two subnets in different zones, from which the database and AWS's endpoints are reached; one coordinator is in each."
  validation {
    condition     = length(var.coordinator_subnets) == 2
    error_message = "Name two subnets: one coordinator is in each."
  }
}

variable "worker_subnets" {
  type        = list(string)
  description = "Subnets of the workers. More zones: more spot capacity; traffic between zones costs."
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
  description = "Names of buckets whose s3:// URLs inputs, outputs, models and data sets name. Laptops may read and write them; workers need nothing of a bucket."
  default     = []
}

variable "max_deliveries" {
  type        = number
  description = "A message that was received so often goes to the dead letter queue."
  default     = 10
}

variable "secrets" {
  type        = list(string)
  description = "Names of secrets that workers may read: [cloud.secrets] allowlist."
  default     = []
}

variable "postgres_url_secret" {
  type        = string
  description = "Name of a secret in Secrets Manager whose value is the database's URL: postgresql://rollout:...@host:5432/rollout. RDS for PostgreSQL 15 or newer, reachable from coordinator_subnets."
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
  description = "What pip installs on coordinators. Until rollout-engine is published, the URL of a wheel of yours: rollout-engine[aws] @ https://..."
  default     = "rollout-engine[aws]"
}

variable "worker_package" {
  type        = string
  description = "What pip installs on workers, with the extras of their engine. Until rollout-engine is published, the URL of a wheel of yours: rollout-engine[aws,vllm,nvml] @ https://..."
  default     = "rollout-engine[aws,vllm,nvml]"
}

variable "coordinator_ami" {
  type        = string
  description = "Image of the coordinators: Debian, Ubuntu or Amazon Linux with Python 3.11 or newer, its venv and the AWS command line."
}

variable "coordinator_instance_type" {
  type        = string
  description = "Two cores and 8 GiB serve some 600 busy workers."
  default     = "m7i.large"
}

variable "worker_ami" {
  type        = string
  description = "Image of the workers: as the coordinators', with the GPU's driver."
}

variable "worker_instance_types" {
  type        = list(string)
  description = "Any of these, whichever is to be had; more of them are interrupted less often."
  default     = ["g6e.xlarge", "g6e.2xlarge"]
}

variable "workers" {
  type        = number
  description = "How many to keep."
  default     = 0
}

variable "max_workers" {
  type        = number
  description = "At most; a replacement for one that is about to be interrupted comes before that one goes."
  default     = 110
}

variable "worker_disk_gib" {
  type        = number
  description = "Root volume of a worker: models and the cache of objects."
  default     = 200
}

variable "drain_budget_s" {
  type        = number
  description = "Seconds that running items get after SIGTERM or an operator's drain. A spot notice has its own: 60 s, or half of what AWS leaves."
  default     = 60
  validation {
    condition     = var.drain_budget_s <= 90
    error_message = "AWS gives 120 s, of which uploading the last results takes some: 90 at most."
  }
}
