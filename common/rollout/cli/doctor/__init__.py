"""What `rollout doctor` looks at, a file for each subject."""
