#!/bin/bash
cat > /app/greet <<'SCRIPT'
#!/bin/bash
echo "$GREETING, $1"
SCRIPT
bash /app/greet "$WHO" > /app/greeting.txt
