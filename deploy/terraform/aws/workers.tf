locals {
  fetch = "aws --region ${var.region} secretsmanager get-secret-value --query SecretString --output text --secret-id"
  worker_toml = templatefile("${path.module}/../worker.toml.tftpl", {
    addresses      = local.coordinators
    cloud          = local.cloud_toml
    compute        = "ec2"
    drain_budget_s = var.drain_budget_s
    secrets        = var.secrets
    secret_store   = "aws"
  })
}

data "aws_ami" "worker" {
  filter {
    name   = "image-id"
    values = [var.worker_ami]
  }
}

resource "aws_launch_template" "worker" {
  name_prefix   = "${var.name}-worker-"
  image_id      = var.worker_ami
  instance_type = var.worker_instance_types[0]
  user_data = base64encode(templatefile("${path.module}/../boot.sh.tftpl", {
    program  = "rollout-worker"
    package  = var.worker_package
    toml     = local.worker_toml
    unit     = file("${path.module}/../../systemd/rollout-worker.service")
    drain_s  = var.drain_budget_s + 15
    fetch    = local.fetch
    address  = ""
    url      = ""
    identity = var.worker_token_secret
    join     = local.coordinators
  }))
  vpc_security_group_ids = [aws_security_group.worker.id]
  update_default_version = true

  iam_instance_profile {
    name = aws_iam_instance_profile.instance["worker"].name
  }
  # Sessions only: a forged request cannot read the role's credentials. Two hops, so that a container reaches it too.
  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }
  block_device_mappings {
    device_name = data.aws_ami.worker.root_device_name
    ebs {
      volume_size = var.worker_disk_gib
      volume_type = "gp3"
      encrypted   = true
    }
  }
  tag_specifications {
    resource_type = "instance"
    tags          = { Name = "${var.name}-worker" }
  }
}

# Spot only. On a rebalance recommendation a replacement starts first. On an interruption the worker reads the notice
# itself, two minutes before, and drains. Whatever else ends an instance, its shutdown stops the service, which drains.
resource "aws_autoscaling_group" "workers" {
  name                = "${var.name}-workers"
  min_size            = 0
  max_size            = var.max_workers
  desired_capacity    = var.workers
  vpc_zone_identifier = var.worker_subnets
  capacity_rebalance  = true

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }
    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.worker.id
        version            = aws_launch_template.worker.latest_version
      }
      dynamic "override" {
        for_each = var.worker_instance_types
        content {
          instance_type = override.value
        }
      }
    }
  }
  instance_refresh {
    strategy = "Rolling"
    preferences {
      min_healthy_percentage = 75
    }
  }
}
