#!/bin/bash
echo "draft 3" >> /app/draft.txt
