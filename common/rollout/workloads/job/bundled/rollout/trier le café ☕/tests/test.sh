#!/bin/bash
# La récompense est 1 si toutes les lignes sont à leur place, sinon 0.
expected=$'Expresso 1.90\nDécaféiné 1.90\nNoisette 2.10\n☕ du jour 2.10\nThé à la menthe 2.80\nCafé crème 3.20\nChocolat « Viennois » 4.50'
if [ "$(cat "/app/carte triée.txt")" = "$expected" ]; then echo 1.0; else echo 0.0; fi > /logs/verifier/reward.txt
