#!/bin/bash
tail -n +3 /proc/net/dev | cut -d : -f 1 | tr -d ' ' | sort > /app/interfaces.txt
