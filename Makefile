# The usual commands. Each makes .venv and installs what it needs.
.PHONY: help demo test all check newest docs package bench

help:
	@echo "make demo    train on two ranks, be killed in the middle of a save, recover"
	@echo "make test    the gate's tests"
	@echo "make all     all tests, with the slow variants that the gate leaves out"
	@echo "make check   the gate: format, lint, types, contracts, the tests"
	@echo "make newest  the tests with the newest release of torch (6 GB)"
	@echo "make docs    docs/api.md from the docstrings, and the documentation site"
	@echo "make package sdist and wheel into dist/, checked and used"
	@echo "make bench   the benchmarks; nothing is recorded"

demo:
	bash .ci/demo

test:
	bash .ci/test

all:
	bash .ci/test --all

check:
	bash .ci/run

newest:
	bash .ci/compat newest

docs:
	bash .ci/docs

package:
	bash .ci/package --keep dist

bench: .venv
	.venv/bin/python -m benchmarks

.venv:
	bash .ci/test --collect-only -q tests/unit/test_docs.py
