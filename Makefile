# Thin front of `python -m scripts`; see README.md and CONTRIBUTING.md.
#
#   make apply           check out the pinned vLLM and apply the series (RESOLVE=1: stop at a conflict)
#   make build           make the wheel (VARIANT=cuda|cpu, ARCH=x86_64|aarch64, SOURCE=1)
#   make test            run everything that the project promises, for all pins
#   make where           print checkout=, python= and wheel=
#   make export          write the checkout's commits to patches/
#   make check           prove the round trip, lint the series and the project
#   make bisect          test the tree after every single patch
#   make bench           measure, and write docs/benchmarks (TRACE=file: replay this trace)
#   make installer       make a file that puts the series into an installed vLLM
#   make image           build an image (BASE=image@digest, NAME=, ENGINE=docker|podman|buildah)
#   make submit FIX=id   print a fix's pull requests, checked; ids are in upstream/fixes.toml
#   make drift SOURCE=x  try the newest series on a newer vLLM: a folder, clone or sdist
#   make clean           remove what the above made; downloads are kept
#
# PIN=v0.19.1|v0.33.0 chooses a release; PYTHON=python3.12 an interpreter (3.11 or newer).

PYTHON ?= python3
tools := build/tools
plots := build/bench/tools
scripts := $(tools)/bin/python -m scripts
pin := $(if $(PIN),--pin $(PIN))
wheel := $(pin) $(if $(VARIANT),--variant $(VARIANT)) $(if $(ARCH),--arch $(ARCH))

.NOTPARALLEL:
.PHONY: apply build test where export check bisect bench installer image submit drift clean

apply: $(tools)/ready
	@$(scripts) apply $(pin) $(if $(RESOLVE),--resolve)

build: $(tools)/ready
	@$(scripts) build $(wheel) $(if $(SOURCE),--source)

where: $(tools)/ready
	@$(scripts) where $(wheel)

test export check bisect: $(tools)/ready
	@$(scripts) $@ $(pin)

bench: $(tools)/ready $(plots)/ready
	@$(scripts) prepare
	@$(plots)/bin/python -m benchmarks all $(if $(TRACE),--trace $(TRACE))
	@$(plots)/bin/python -m benchmarks.sizing

installer: $(tools)/ready
	@$(scripts) installer $(pin) $(if $(ARCH),--arch $(ARCH))

image: $(tools)/ready
	@$(scripts) image $(pin) $(if $(ARCH),--arch $(ARCH)) $(if $(BASE),--base $(BASE)) $(if $(NAME),--name $(NAME)) $(if $(ENGINE),--engine $(ENGINE))

submit: $(tools)/ready
	@$(scripts) submit $(pin) --fix "$(FIX)"

drift: $(tools)/ready
	@$(scripts) drift $(pin) --source "$(SOURCE)"

clean:
	rm -rf build

define virtual_environment
@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11.4 or newer is needed; name one with PYTHON=" if sys.version_info < (3, 11, 4) else 0)'
@rm -rf $(@D)
@$(PYTHON) -m venv $(@D) >&2 || { echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $< >&2
@touch $@
endef

# The tools live in virtual environments of the project's own.
$(tools)/ready: scripts/requirements.txt
	$(virtual_environment)

$(plots)/ready: benchmarks/requirements.txt
	$(virtual_environment)
