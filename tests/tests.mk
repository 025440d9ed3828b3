# The tests: included by the Makefile. Every test program is a target check/NAME; scripts/test.sh runs it, prints one line and keeps its
# result. `make help` lists the targets and switches of this file, too.

SCRIPT_TESTS = $(shell find tests/model tests/cli tests/interop tests/fault -maxdepth 1 -type f -perm -u+x 2>/dev/null | sort)
# Nine seconds of CPU time and more under valgrind, or a limit of descriptors that it sets itself; the sanitizers see the same code.
VALGRIND_SKIP = convert/test_hf quant/test_numbers quant/test_schemes runtime/test_sample runtime/test_sample_rows runtime/test_slots runtime/test_split_scan \
  formats/test_safetensors quant/test_search runtime/test_input runtime/test_cpu_rows runtime/test_cpu_steps runtime/test_engine runtime/test_processes runtime/test_schedules runtime/test_tokenizer runtime/test_scheduler runtime/test_reuse runtime/test_ahead runtime/test_drafts \
  runtime/test_dispatch runtime/test_reply loader/test_verify loader/test_archive loader/test_reader convert/test_pattern convert/test_step formats/test_json quant/test_activation \
  runtime/test_tokenizer_image loader/test_landing formats/test_frame runtime/test_constraint runtime/test_ops runtime/test_chat_m3 quant/test_feedback quant/test_coupling runtime/test_gradient \
  runtime/test_dflash convert/test_encoding runtime/test_engine_memory convert/test_resume formats/test_pool formats/test_pack_ranks loader/test_random_weights \
  runtime/test_grammar runtime/test_hostile_schemas runtime/test_pages runtime/test_offload runtime/test_transfer runtime/test_slow_disk \
  runtime/test_descriptors
VALGRIND_UNIT = $(filter-out $(VALGRIND_SKIP:%=tests/unit/%.c),$(UNIT_SRC))
# Relative where the folder has a name with spaces, which no target may have.
export VENV ?= $(if $(filter 1,$(words $(CURDIR))),$(CURDIR)/)build/venv
export SAN
SANITIZED = CC=clang SAN=1 FUZZ=fast CUDA=0 BUILD=$(BUILD)/san
PLAIN = CC=clang CUDA=0 FAST=1
run = $(Q)BUILD=$(abspath $(BUILD)) scripts/test.sh $@

T_UNIT = $(UNIT_SRC:tests/%.c=check/%)
T_MODEL = $(patsubst tests/%.c,check/%,$(filter $(addsuffix /test_%,tests/model tests/ops),$(MODEL_SRC)))
T_SCRIPT = $(SCRIPT_TESTS:tests/%=check/%)
# A table of choices that has no memory of its own takes half a minute there, and sees nothing.
T_SAN = check/san/build $(filter-out %/test_dispatch,$(UNIT_SRC:tests/%.c=check/san/%)) check/san/part_files check/san/serve_empty
# What has threads, under the thread sanitizer.
TSAN_UNIT = formats/test_pool loader/test_archive loader/test_reader loader/test_verify convert/test_step runtime/test_comm runtime/test_engine \
  runtime/test_away runtime/test_scheduler runtime/test_reuse runtime/test_ahead runtime/test_drafts runtime/test_transfer
T_TSAN = check/tsan/build $(TSAN_UNIT:%=check/tsan/unit/%) check/tsan/convert
# In make check clang's code is that of check/san/build, at -O1; make soak runs the units of clang's -O2, too.
T_CLANG = check/clang/build $(UNIT_SRC:tests/%.c=check/clang/%)
T_PLAIN = check/plain/build
T_VALGRIND = $(VALGRIND_UNIT:tests/unit/%.c=check/valgrind/%)
T_FUZZ = check/san/build $(FUZZ_SRC:tests/fuzz/%.c=check/fuzz/%)
T_TREE = check/lint check/reproducible

$(T_UNIT) $(T_MODEL): check/%: $(BUILD)/tests/%
	$(run) $<
check/unit/runtime/test_nccl: $(PRELOAD)
$(T_SCRIPT): check/%: $(PROGRAMS) $(MODEL) $(PRELOAD) $(LIBRARY)
	$(run) tests/$*
$(filter check/interop/% check/fault/sequences.py,$(T_SCRIPT)): $(VENV)/ready
$(filter check/cli/new_% check/interop/python_package.sh,$(T_SCRIPT)): check/plain/build
ifeq ($(SAN),0) # packed checkpoints of attackers meet programs with sanitizers
$(filter check/fault/mutations.py,$(T_SCRIPT)): check/san/build
endif
$(T_VALGRIND): check/valgrind/%: $(BUILD)/tests/unit/%
	$(run) valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect,possible $<
$(filter-out %/build %/part_files %/serve_empty,$(T_SAN)): check/san/%: check/san/build
	$(run) $(BUILD)/san/tests/$*
check/san/part_files: check/san/build $(VENV)/ready
	$(run) env BUILD=$(abspath $(BUILD))/san tests/interop/part_files.py
check/san/serve_empty: check/san/build
	$(run) env BUILD=$(abspath $(BUILD))/san tests/cli/serve_empty.py
$(filter check/tsan/unit/%,$(T_TSAN)): check/tsan/%: check/tsan/build
	$(run) $(BUILD)/tsan/tests/$*
check/tsan/convert: check/tsan/build
	$(run) sh -c '$(BUILD)/tsan/bin/minimax-convert tests/data/tiny-m2 -o "$$TMPDIR/out" --tp 2 --quant nvfp4 --jobs 4 -q && \
	  $(BUILD)/tsan/bin/minimax-verify "$$TMPDIR/out" --source tests/data/tiny-m2 -j 4'
$(filter-out %/build,$(T_CLANG)): check/clang/%: check/clang/build
	$(run) $(BUILD)/clang/tests/$*
$(filter-out %/build,$(T_FUZZ)): check/fuzz/%: check/san/build
	$(run) scripts/fuzz.sh $(BUILD)/san $* $(FUZZ_SECONDS)
# One build holds clang's warnings, the sanitizers and the coverage that libFuzzer reads. Comparisons that it watches besides take half of the
# time of unit tests that parse: make soak has them.
check/san/build:
	$(run) $(MAKE) -k --no-print-directory $(SANITIZED) all tests fuzzers
check/tsan/build:
	$(run) $(MAKE) -k --no-print-directory SAN=thread CUDA=0 BUILD=$(BUILD)/tsan $(TSAN_UNIT:%=$(BUILD)/tsan/tests/unit/%) \
	  $(BUILD)/tsan/bin/minimax-convert $(BUILD)/tsan/bin/minimax-verify
check/clang/build:
	$(run) $(MAKE) -k --no-print-directory CC=clang CUDA=0 BUILD=$(BUILD)/clang all tests
# Programs for tests of the build itself.
check/plain/build:
	$(run) $(MAKE) -k --no-print-directory $(PLAIN) BUILD=$(BUILD)/plain all
check/lint:
	$(run) $(MAKE) --no-print-directory lint TIDY_NODES=8000
check/reproducible: check/plain/build
	$(run) scripts/reproducible.sh $(BUILD)/plain/bin $(MAKE) $(PLAIN)

count = @scripts/test.sh --count $(BUILD) $^

# The longest first, so that no CPU waits for one of them in the end (BUILD/check/times).
T_LONG = $(if $(filter 0,$(SAN)),check/san/build check/lint check/tsan/build) $(filter $(addprefix %/,golden.sh sources.py docs_commands.py \
  tp_invariance.py calibration.py serve_clients.py journey_prepare.py serve_calls.py serve_hostile.py archive.py serve_connections.py minimax_run.py \
  layout_hf.py reshard.py convert_same.py quant_oracles.py full_size.py forced_calls.py),$(T_SCRIPT))
check: $(T_LONG) $(T_UNIT) $(T_MODEL) $(T_SCRIPT) ## every test; ends with "N passed, N failed"
ifeq ($(SAN),0)
check: $(T_TREE) $(T_VALGRIND) $(T_SAN) $(T_TSAN) $(T_PLAIN) $(T_FUZZ)
endif
# What a developer runs at each commit.
T_QUICK = $(T_UNIT) $(T_MODEL) $(addprefix check/,model/golden.sh) $(addprefix check/interop/,block_fp8.py report_error.py serve_clients.py \
  static_inputs.py verify_unsharded.py) $(addprefix check/cli/,docs.sh layers.sh convert_cut.py convert_hostile.py convert_spelling.py \
  inspect_listing.py journey_prepare.py library.sh minimax_run.py outputs.py serve.py sign.py unchanged.py)
quick: lint-format lint-tree lint-words $(T_QUICK) ## build, unit tests, golden logits, layers and format: a minute or less
	@scripts/test.sh --count $(BUILD) $(T_QUICK)
T_SERVE = $(filter check/unit/runtime/test_scheduler check/unit/runtime/test_grammar check/unit/runtime/test_constraint check/unit/runtime/test_reply,$(T_UNIT)) $(filter check/cli/serve% check/interop/serve%,$(T_SCRIPT))
serve-check: $(T_SERVE) ## the server: clients of OpenAI, Anthropic and LangChain, curl, its page, a short load, hostile requests
unit: $(T_UNIT) ## unit tests
model: $(T_MODEL) $(filter check/model/%,$(T_SCRIPT)) ## operators and whole models against reference results
cli: $(filter-out check/model/%,$(T_SCRIPT)) ## the programs from outside: command lines, interop, hardening
valgrind: $(T_VALGRIND) ## small unit tests under valgrind
check-san: $(T_SAN) ## unit tests and conversions under address and undefined-behaviour sanitizers
check-tsan: $(T_TSAN) ## what has threads, under the thread sanitizer
check-clang: $(T_CLANG) ## unit tests built by clang at -O2
fuzz: $(T_FUZZ) ## FUZZ_SECONDS of libFuzzer on every tests/fuzz/fuzz_*.c
check serve-check unit model cli valgrind check-san check-tsan check-clang fuzz:
	$(count)

# Before a release: hours. The parts are in scripts/soak.sh; each runs alone as soak-PART and leaves BUILD/soak/PART.log.
#: SOAK="kill fuzz" the parts of make soak
SOAK ?= clang calls alloc kill resume sequences believed power races flips mutations mpi speed memory layer schedules scheduler serve fuzz
SOAK_UNIT = $(patsubst %,$(BUILD)/tests/unit/runtime/test_%,schedules scheduler ahead drafts)
soak: $(PROGRAMS) $(MODEL) $(PRELOAD) $(NO_HASH) $(SOAK_UNIT) $(if $(filter fuzz,$(SOAK)),soak-fuzz-build) ## the fault tests whole, a figure a line; soak-PART for one of them
	$(Q)failed=0; for p in $(SOAK); do BUILD=$(abspath $(BUILD)) scripts/soak.sh $$p || failed=1; done; exit $$failed
soak-fuzz: soak-fuzz-build
	$(Q)BUILD=$(abspath $(BUILD)) scripts/soak.sh fuzz
soak soak-sequences: $(VENV)/ready
soak-%: $(PROGRAMS) $(MODEL) $(PRELOAD) $(NO_HASH) $(SOAK_UNIT)
	$(Q)BUILD=$(abspath $(BUILD)) scripts/soak.sh $*
soak-fuzz-build:
	$(Q)$(MAKE) --no-print-directory $(SANITIZED) fuzzers >/dev/null
	$(Q)$(MAKE) --no-print-directory $(SANITIZED) FUZZ=1 BUILD=$(BUILD)/soak-fuzz fuzzers >/dev/null

$(VENV)/ready:
	$(Q)scripts/venv.sh $(VENV) safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0 pytest==9.2.0 Jinja2==3.1.6 jsonschema==4.26.0 openai==3.54.0 anthropic==2.12.0 h11==0.16.0
# LangChain's client wants an older openai.
check/interop/serve_langchain.py: $(VENV)-langchain/ready
$(VENV)-langchain/ready:
	$(Q)scripts/venv.sh $(VENV)-langchain langchain-openai==1.2.1 langchain-core==1.3.3

# The harness brings 600 MB of packages, so its task is not in make check.
$(VENV)-lm-eval/ready:
	$(Q)scripts/venv.sh $(VENV)-lm-eval lm-eval==0.4.13 tenacity aiohttp tqdm requests
lm-eval: $(PROGRAMS) $(VENV)-lm-eval/ready ## a task of lm-evaluation-harness against minimax-serve, its values those of minimax-eval
	$(Q)mkdir -p $(BUILD)/lm-eval && rm -rf $(BUILD)/lm-eval/*
	$(Q)BUILD=$(abspath $(BUILD)) TMPDIR=$(abspath $(BUILD))/lm-eval $(VENV)-lm-eval/bin/python tests/interop/lm_eval_task.py

# Other engines' libraries: 15 GB, so not in make check, which says that their tests were not run.
LIBRARIES = $(shell python3 tests/interop/engine_libraries.py $(1))
$(VENV)-engines/ready:
	$(Q)scripts/venv.sh $(VENV)-engines $(call LIBRARIES,NEEDS) && rm $@
	$(Q)$(VENV)-engines/bin/pip install --quiet --disable-pip-version-check --no-deps $(call LIBRARIES,ALONE) && touch $@
$(VENV)-vllm/ready:
	$(Q)scripts/venv.sh $(VENV)-vllm $(call LIBRARIES,VLLM)
engines: export ENGINES_VENV = $(VENV)-engines
engines: export VLLM_PYTHON = $(VENV)-vllm/bin/python
engines: $(PROGRAMS) $(VENV)-engines/ready $(VENV)-vllm/ready ## tests with other engines' libraries, which it installs (15 GB), and docs/engines.md again
	$(Q)$(MAKE) --no-print-directory check/interop/engines.py check/interop/sources_peers.py check/interop/drafts_torch.py check/interop/drafts_torch_quant.py \
	  check/interop/python_package.sh
	$(Q)scripts/engines.py $(BUILD) >$(BUILD)/engines.md && cp $(BUILD)/engines.md docs/engines.md

$(FUZZ_SRC:%.c=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(LIBS_all)
	$(link) -fsanitize=fuzzer -o $@
fuzzers: $(FUZZ_SRC:%.c=$(BUILD)/%)

GPU = $(BUILD)/tests/ops/gpu
$(GPU): private LDFLAGS := $(LDFLAGS) -Wl,--wrap=cudaGraphInstantiate,--wrap=cudaMalloc
$(GPU): $(patsubst %,$(BUILD)/%.o,$(wildcard tests/ops/*.cu)) $(BUILD)/tests/ops/cpu_blocks.o $(LIBS_all)
	$(link) -o $@
gpu: $(if $(filter 1,$(CUDA)),$(GPU) $(PROGRAMS)) ## every CUDA test, on a machine with a GPU (scripts/gpu.sh runs them from a prebuilt folder)
	$(Q)$(if $(filter 1,$(CUDA)),scripts/gpu.sh $(BUILD),echo "make gpu: needs CUDA=1" >&2; exit 2)
