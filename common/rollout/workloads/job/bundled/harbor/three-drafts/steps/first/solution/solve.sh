#!/bin/bash
echo "draft 1" >> /app/draft.txt
