#!/bin/bash
set -e
cat > /app/count-words <<'SCRIPT'
#!/bin/bash
# Words in the text files of a directory.
shopt -s nullglob
total=0
cd "$1" || exit 1
for file in *.txt; do
  words=$(wc -w < "$file")
  echo "$words $file"
  total=$((total + words))
done
echo "$total total"
SCRIPT
chmod +x /app/count-words
