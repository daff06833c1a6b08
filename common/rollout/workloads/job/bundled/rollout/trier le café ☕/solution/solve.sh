#!/bin/bash
awk '{print $NF "\t" $0}' "/app/la carte.txt" | sort -s -n -k1,1 | cut -f 2- > "/app/carte triée.txt"
