resource "google_storage_bucket" "objects" {
  name                        = var.bucket
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  # Both off on purpose: an object's name is the hash of its bytes, so it never changes, and what a deleted run frees
  # must go.
  versioning {
    enabled = false
  }
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  # Of uploads by other tools: Rollout's sessions end by themselves after a week, and cost nothing.
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 7
    }
  }
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 7
      matches_prefix = ["${var.prefix}temp/"]
    }
  }
}
