data "aws_secretsmanager_secret" "allowed" {
  for_each = toset(var.secrets)
  name     = each.value
}

data "aws_secretsmanager_secret" "boot" {
  for_each = {
    postgres_url = var.postgres_url_secret
    authority    = var.authority_secret
    worker_token = var.worker_token_secret
  }
  name = each.value
}

locals {
  data_arns = [for bucket in var.data_buckets : "arn:${data.aws_partition.this.partition}:s3:::${bucket}"]
  arns = {
    bucket       = [aws_s3_bucket.objects.arn]
    objects      = ["${aws_s3_bucket.objects.arn}/${var.prefix}*"]
    data_buckets = local.data_arns
    data         = [for arn in local.data_arns : "${arn}/*"]
    queue        = [aws_sqs_queue.input.arn]
    output_queue = [aws_sqs_queue.output.arn]
    secrets      = [for secret in data.aws_secretsmanager_secret.allowed : secret.arn]
  }
  boot_arns = {
    coordinator = [for key in ["postgres_url", "authority"] : data.aws_secretsmanager_secret.boot[key].arn]
    worker      = [data.aws_secretsmanager_secret.boot["worker_token"].arn]
    laptop      = []
    operator    = []
  }
}

module "permissions" {
  source   = "../permissions"
  for_each = local.boot_arns
  cloud    = "aws"
  role     = each.key
  arns     = merge(local.arns, { boot_secrets = each.value })
}

# Of people: attach these to their role or group.
resource "aws_iam_policy" "people" {
  for_each = toset(["laptop", "operator"])
  name     = "${var.name}-${each.key}"
  policy   = module.permissions[each.key].policy
}

# Of instances.
resource "aws_iam_role" "instance" {
  for_each = toset(["coordinator", "worker"])
  name     = "${var.name}-${each.key}"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "instance" {
  for_each = aws_iam_role.instance
  name     = "rollout"
  role     = each.value.id
  policy   = module.permissions[each.key].policy
}

resource "aws_iam_instance_profile" "instance" {
  for_each = aws_iam_role.instance
  name     = each.value.name
  role     = each.value.name
}
