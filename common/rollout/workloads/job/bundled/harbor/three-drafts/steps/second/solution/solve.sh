#!/bin/bash
echo "draft 2" >> /app/draft.txt
