"""Every way round the fence of tests/data/bypass.json, sent through Python's sqlite3.

The same statements, answers and invariants as in tests/it/bypass.rs, on the SQLite that Python brings.
"""

import json
import pathlib
import re
import sqlite3
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = json.loads((ROOT / "tests/data/bypass.json").read_text(encoding="utf-8"))
CONTRACT = (ROOT / "schema.sql").read_text(encoding="utf-8")
CODE = re.compile(r"\bFP0\d\d\b")
WORKERS = re.compile(r"INTO outbox(_fence|_seal|_claim|_acquire|_renew|_release|_tenure|_verdict|_cancel|_adopt|_discard)?[ (]")


def attempts():
    for answer, *first, template in DATA["attempts"]:
        sqls = [template]
        for hole in ("or", "rowid", "upsert", "bad"):
            mark = "{" + hole + "}"
            sqls = [sql.replace(mark, text) for sql in sqls for text in (DATA[hole] if mark in sql else [""])]
        for sql in sqls:
            yield answer, first, sql


class Bench:
    """A database with the setup, made anew as soon as an attempt changed anything in it."""

    def __init__(self, recursive):
        self.recursive = recursive
        self.template = sqlite3.connect(":memory:", isolation_level=None)
        self.template.executescript("BEGIN;\n" + CONTRACT + "COMMIT;")
        for sql in DATA["setup"]:
            self.template.execute(sql)
        self.renew()
        self.dump = self.dump_of()

    def renew(self):
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.template.backup(self.db)
        self.db.execute("PRAGMA recursive_triggers = " + ("ON" if self.recursive else "OFF"))
        self.remember()

    def remember(self):
        for table in DATA["before"]:
            self.db.execute(f"DROP TABLE IF EXISTS temp.was_{table}")
            self.db.execute(f"CREATE TEMP TABLE was_{table} AS SELECT * FROM {table}")

    def dump_of(self):
        return [(table, row) for table in [*DATA["before"], "outbox_refusal"] for row in self.db.execute(f"SELECT * FROM {table}")]

    def count(self, table):
        return self.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    def passed_over(self, sql):
        try:
            self.db.execute(sql).fetchall()
        except sqlite3.Error as error:
            return error
        return None

    def attempt(self, right, first, sql, around):
        for statement in first:
            self.db.execute(statement)
        if first:
            self.remember()
        commands = self.count("outbox")
        before = self.dump_of() if first else self.dump
        for statement in around:
            self.db.execute(statement)
        error = self.passed_over(sql)
        if error is not None and len(around) == 3:
            self.passed_over("ROLLBACK TO p")
        if around:
            self.passed_over("COMMIT")
        more = self.count("outbox") - commands
        found = CODE.search(str(error)) if isinstance(error, sqlite3.IntegrityError) else None
        code = found.group() if found else None
        if not is_right(right, error, code, more):
            yield f"the answer is {error!r} and {more} more, not {right}"
        if around and code and self.count("orders") != (0 if WORKERS.search(sql) else 1):
            yield f"{self.count('orders')} business rows after {code}"
        self.db.execute("DELETE FROM orders")
        after = self.dump_of()
        if error is not None and after != before:
            yield "refused, and something changed"
        if first or after != self.dump:
            yield from self.breaches()
            self.renew()

    def breaches(self):
        return [name for name, query in DATA["invariants"] if self.db.execute(query).fetchone() is not None]


def is_right(right, error, code, more):
    if right.startswith("new "):
        return error is None and more == int(right[4:])
    if right == "same":
        return error is None and more == 0
    if right == "none":
        return more == 0
    if right == "error":
        return error is not None and more == 0
    return code is not None and right in (code, "FP") and more == 0


def main():
    wrong = []
    tried = 0
    savepoint = ["BEGIN IMMEDIATE", "INSERT INTO orders VALUES('before')", "SAVEPOINT p"]
    for recursive, around in [(False, []), (True, savepoint)]:
        bench = Bench(recursive)
        wrong += bench.breaches()
        for right, first, sql in attempts():
            tried += 1
            wrong += [f"{what}: {sql}" for what in bench.attempt(right, first, sql, around)]
    print(f"SQLite {sqlite3.sqlite_version}: {tried} attempts, {len(wrong)} breaches")
    print("\n".join(wrong))
    return 1 if wrong or tried < 4000 else 0


if __name__ == "__main__":
    sys.exit(main())
