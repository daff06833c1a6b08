# What a role of deploy/iam.yaml may do. No provider is needed, so that a test can evaluate it.
terraform {
  required_version = ">= 1.5"
}

variable "cloud" {
  type        = string
  description = "aws or gcp."
}

variable "role" {
  type        = string
  description = "A role of deploy/iam.yaml: coordinator, worker, laptop, operator."
}

variable "arns" {
  type        = map(list(string))
  description = "aws: ARNs by resource of deploy/iam.yaml; a resource without any gets no statement."
  default     = {}
}

locals {
  calls     = yamldecode(file("${path.module}/../../iam.yaml"))[var.cloud].calls
  rows      = [for call in local.calls : { on = call.who[var.role], needs = call.needs } if can(call.who[var.role])]
  resources = distinct([for row in local.rows : row.on])
  permissions = {
    for resource in local.resources :
    resource => sort(distinct(flatten([for row in local.rows : row.needs if row.on == resource])))
  }
}

output "permissions" {
  description = "Permissions by resource."
  value       = local.permissions
}

output "policy" {
  description = "aws: the policy document, as JSON."
  value = jsonencode({
    Version = "2012-10-17"
    Statement = [
      for resource, actions in local.permissions : {
        Sid      = replace(resource, "_", "")
        Effect   = "Allow"
        Action   = actions
        Resource = var.arns[resource]
      } if length(lookup(var.arns, resource, [])) > 0
    ]
  })
}
