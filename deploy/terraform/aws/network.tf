resource "aws_security_group" "worker" {
  name        = "${var.name}-worker"
  description = "Workers: they dial, nobody dials them."
  vpc_id      = var.vpc_id
}

resource "aws_security_group" "coordinator" {
  name        = "${var.name}-coordinator"
  description = "Coordinators: workers and clients dial them."
  vpc_id      = var.vpc_id
}

resource "aws_vpc_security_group_egress_rule" "all" {
  for_each          = { worker = aws_security_group.worker.id, coordinator = aws_security_group.coordinator.id }
  security_group_id = each.value
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
}

# Calls, joining, and bulk bytes: [transport] listen_addr, join_addr and [objects] listen_addr.
resource "aws_vpc_security_group_ingress_rule" "workers" {
  security_group_id            = aws_security_group.coordinator.id
  referenced_security_group_id = aws_security_group.worker.id
  ip_protocol                  = "tcp"
  from_port                    = 50051
  to_port                      = 50053
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each          = toset(var.client_cidrs)
  security_group_id = aws_security_group.coordinator.id
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 50051
  to_port           = 50053
}
