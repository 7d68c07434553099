"""A worker that is stopped inside a transaction (H82): python3 stopped.py DATABASE writes|reads

Says on each line of its output how far it came. It stops itself with SIGSTOP and goes on when somebody
sends SIGCONT.
"""
import os
import signal
import sqlite3
import sys

connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0)


def say(text):
    print(text, flush=True)


def attempt(statement):
    try:
        connection.execute(statement)
        return "ok"
    except sqlite3.Error as error:
        return str(error)


connection.execute("BEGIN IMMEDIATE")
connection.execute("INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('s', 'w1', 1)")
(token,) = connection.execute("SELECT token FROM outbox_lease WHERE scope = 's' AND holder = 'w1'").fetchone()
connection.execute("COMMIT")
command = (
    "INSERT INTO outbox(id, scope, token, holder, kind, destination, payload) "
    f"VALUES ('inherited', 's', {token}, 'w1', 'webhook', 'absent', '{{}}')"
)
if sys.argv[2] == "writes":
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE orders SET paid = 1")
    say("inside")
    os.kill(os.getpid(), signal.SIGSTOP)
    connection.execute(command)
    connection.execute("COMMIT")
    say("committed")
else:
    connection.execute("BEGIN")
    connection.execute("SELECT paid FROM orders").fetchone()
    say("inside")
    os.kill(os.getpid(), signal.SIGSTOP)
    say("write: " + attempt("UPDATE orders SET paid = 1"))
    say("again: " + attempt(command))
    connection.execute("ROLLBACK")
    connection.execute("BEGIN IMMEDIATE")
    say("anew: " + attempt(f"INSERT INTO outbox_fence(scope, token, holder) VALUES ('s', {token}, 'w1')"))
