terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0, < 8.0"
    }
  }
}

provider "google" {
  project        = var.project
  region         = var.region
  default_labels = { rollout = var.name }
}

data "google_project" "this" {}
