#!/bin/bash
sort -n /app/index | tail -n 1 > /app/largest.txt
