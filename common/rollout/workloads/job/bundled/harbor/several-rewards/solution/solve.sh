#!/bin/bash
cat > /app/tally <<'SCRIPT'
#!/bin/bash
declare -A seen
while IFS= read -r line; do
  if [[ ! -v seen["x$line"] ]]; then
    seen["x$line"]=1
    printf '%s\n' "$line"
  fi
done < "$1"
SCRIPT
