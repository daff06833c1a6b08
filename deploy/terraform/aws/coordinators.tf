# Two, each in a zone of its own. Nothing is kept on their disks: the ledger is in Postgres, objects are in the bucket.

# An address that outlives the instance: workers and certificates know it.
resource "aws_network_interface" "coordinator" {
  count           = 2
  subnet_id       = var.coordinator_subnets[count.index]
  security_groups = [aws_security_group.coordinator.id]
}

locals {
  coordinators = [for card in aws_network_interface.coordinator : card.private_ip]
  cloud_toml = templatefile("${path.module}/cloud.toml.tftpl", {
    region     = var.region
    bucket     = aws_s3_bucket.objects.bucket
    prefix     = var.prefix
    input_url  = aws_sqs_queue.input.url
    output_url = aws_sqs_queue.output.url
    secrets    = var.secrets
  })
  coordinator_toml = templatefile("${path.module}/../coordinator.toml.tftpl", {
    addresses = local.coordinators
    cloud     = local.cloud_toml
  })
}

resource "aws_instance" "coordinator" {
  count                = 2
  ami                  = var.coordinator_ami
  instance_type        = var.coordinator_instance_type
  iam_instance_profile = aws_iam_instance_profile.instance["coordinator"].name
  user_data = templatefile("${path.module}/../boot.sh.tftpl", {
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
  user_data_replace_on_change = true

  primary_network_interface {
    network_interface_id = aws_network_interface.coordinator[count.index].id
  }
  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }
  root_block_device {
    volume_size = 20
    volume_type = "gp3"
    encrypted   = true
  }
  tags = { Name = "${var.name}-coordinator-${count.index}" }
}
