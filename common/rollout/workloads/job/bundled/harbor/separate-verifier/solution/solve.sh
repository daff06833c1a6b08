#!/bin/bash
{
  echo customer,total
  tail -n +2 /app/orders.csv | awk -F, '{sum[$1] += $2} END {for (name in sum) print name "," sum[name]}' | sort
} > /app/report.csv
