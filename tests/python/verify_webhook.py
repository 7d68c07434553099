"""Verifies one request with the official Standard Webhooks verifier.

Reads a JSON object from standard input: `secret`, `headers` (an object) and `body` (hexadecimal).
Exits with 0 if the signature holds, else with a traceback.
"""

import json
import sys

from standardwebhooks.webhooks import Webhook

request = json.load(sys.stdin)
body = bytes.fromhex(request["body"])
Webhook(request["secret"]).verify(body, request["headers"], json_parse=False)
