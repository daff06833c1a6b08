"""What `rollout cloud doctor` looks at, a file for each subject."""
