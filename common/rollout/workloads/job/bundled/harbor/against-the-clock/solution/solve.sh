#!/bin/bash
mkdir -p /app/sums
for part in /app/parts/*; do
  sha256sum < "$part" | cut -d ' ' -f 1 > "/app/sums/$(basename "$part")"
done
