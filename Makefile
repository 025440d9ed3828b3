# minimax: convert, verify and serve MiniMax checkpoints. `make help` lists the targets and switches.

#: CC=clang        the C compiler (gcc)
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
#: V=1             show every command
V ?= 0
#: SAN=1           address and undefined-behaviour sanitizers, in build/san; SAN=thread: the thread sanitizer
SAN ?= 0
#: FAST=1          no optimisation: compiles in half the time, for tests of the build itself
FAST ?= 0
#: CUDA=0          leave the CUDA backend out (built when nvcc is found)
NVCC ?= $(shell command -v nvcc)
CUDA ?= $(if $(filter 0,$(SAN)),$(if $(NVCC),1,0),0)
#: CUDA_ARCH="90a" GPU code to build ("80 90a compute_90"): 90a is code for sm_90a, compute_90 is PTX for every newer GPU
CUDA_ARCH ?= 80 90a compute_90
#: STATIC=1        link zstd, OpenSSL, PCRE2, libevent and libedit into the programs, to carry them to another machine
STATIC ?= 0
#: LIBEDIT=0       leave libedit out, which edits lines of minimax-run --chat (linked when pkg-config finds it)
LIBEDIT ?= $(shell pkg-config --exists libedit && echo 1 || echo 0)
#: MPI=1           conversions and runs over several processes with mpirun (Open MPI)
MPI ?= 0
#: BUILD=DIR       where everything built goes (build)
BUILD ?= build$(if $(filter 1,$(SAN)),/san)
#: PREFIX, DESTDIR where install puts things (/usr/local)
PREFIX ?= /usr/local
#: FUZZ_SECONDS=N  length of each fuzz run (3)
FUZZ_SECONDS ?= 3

VERSION := $(shell sed -n 's/^.define MM_VERSION "\(.*\)"/\1/p' formats/system/base.h)
export COMMIT ?= $(shell git describe --always --dirty --exclude '*' 2>/dev/null)

ifeq ($(MAKELEVEL),0)
# One more than there are CPUs: some tests wait.
MAKEFLAGS += -j$(shell expr $$(nproc) + 1)
endif
Q = $(if $(filter 1,$(V)),,@)
# A line for each file that is made.
said = $(if $(filter 1,$(V)),,echo '$(1)' &&)
.DEFAULT_GOAL = all

# ---- flags

PKGS = libcrypto libpcre2-8 libzstd libevent
WARN = -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
CPPFLAGS = -I. -D_GNU_SOURCE $(PKG_CFLAGS) -MMD -MP
CFLAGS = -std=c11 -O2 -g -ffile-prefix-map="$(CURDIR)=." -fPIE -fstack-protector-strong -fstack-clash-protection $(WARN)
LDFLAGS = -pie -Wl,--as-needed -Wl,-z,relro,-z,now -Wl,-z,noexecstack
LD = $(CC)
# A comma, for arguments of functions.
, := ,
PKG_CFLAGS := $(shell pkg-config --cflags $(PKGS))
LIBS := $(shell pkg-config --libs $(PKGS))
LIBEDIT_LIBS := $(if $(filter 1,$(LIBEDIT)),$(shell pkg-config --libs $(if $(filter 1,$(STATIC)),--static) libedit))
ifeq ($(STATIC),1)
LIBS := -Wl,-Bstatic $(LIBS) -Wl,-Bdynamic
LIBEDIT_LIBS := $(if $(LIBEDIT_LIBS),-Wl$(,)-Bstatic $(LIBEDIT_LIBS) -Wl$(,)-Bdynamic)
endif
LIBS += -lm -lpthread
ifeq ($(MPI),1)
CPPFLAGS += -DMM_MPI $(shell pkg-config --cflags-only-I ompi-c | sed 's/-I/-isystem /g')
LIBS += $(shell pkg-config --libs ompi-c)
endif

ifeq ($(SAN),1)
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# Sanitised code compiles twice as fast at -O1 as at -O2, with the same checks.
CFLAGS += -O1 -g1 $(SANITIZE) $(if $(FUZZ),-fsanitize=fuzzer-no-link) $(if $(filter fast,$(FUZZ)),-fno-sanitize-coverage=trace-cmp)
# gold links these programs in half the time.
LDFLAGS += $(SANITIZE) $(if $(shell command -v ld.gold),-fuse-ld=gold)
# Code that tests do not run for long compiles five times as fast at -O0, with the same checks.
LONG_TESTS = $(patsubst %,tests/unit/runtime/test_%.c,gradient schedules scheduler reuse drafts ahead slots processes input sample sample_rows cpu_rows cpu_steps)
$(patsubst %,$(BUILD)/%/%.o,convert runtime/serve runtime/bench runtime/chat runtime/schedule tests/unit/convert tests/unit/loader tests/unit/formats) \
  $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(LONG_TESTS),$(wildcard tests/unit/runtime/*.c))): private CFLAGS += -O0
# The counters that guide libFuzzer take much of the time of loops over numbers. fuzz_packed, which reaches quant and runtime/cpu, has those of all else.
$(patsubst %,$(BUILD)/%.o,quant/% runtime/cpu/% runtime/engine/sample tests/unit/%): private CFLAGS += $(if $(FUZZ),-fno-sanitize=fuzzer-no-link)
# Frames that outlive their calls cost the inner loops of products and of schemas' values much time; these give no address of a frame away.
$(BUILD)/runtime/cpu/cpu_rows_%.o $(BUILD)/runtime/constrain/schema_made.o: private CFLAGS += $(if $(findstring clang,$(CC)),-fsanitize-address-use-after-return=never)
# gcc 12 aligns its frames for use after return to 32 bytes, and vectors of 64 lie in them.
$(BUILD)/runtime/cpu/cpu_rows_avx512.o $(BUILD)/runtime/cpu/cpu_rows_vbmi.o $(BUILD)/runtime/cpu/cpu_rows_bf16.o $(BUILD)/runtime/cpu/cpu_rows_vnni.o: private CFLAGS += $(if $(findstring clang,$(CC)),,--param asan-use-after-return=0)
else ifeq ($(SAN),thread)
CFLAGS += -O1 -g1 -fsanitize=thread
# Loops over numbers, which take no locks and start no threads: most of the time was theirs. Their callers are watched.
$(BUILD)/runtime/cpu/cpu_rows_%.o $(BUILD)/runtime/cpu/cpu_vectors.o: private CFLAGS += -fno-sanitize=thread
LDFLAGS += -fsanitize=thread $(if $(shell command -v ld.gold),-fuse-ld=gold)
else ifeq ($(FAST),1)
CFLAGS += -O0 -g1
else
CPPFLAGS += -D_FORTIFY_SOURCE=3
endif

CUDA_SRC = $(wildcard runtime/cuda/*.cu runtime/cuda/*/*.cu)
ifeq ($(CUDA),1)
CUDA_HOME := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
NVCCFLAGS = -std=c++17 -O3 -lineinfo -I. -DMM_CUDA -MMD -MP -cudart static -Xcompiler -fPIE,-fstack-protector-strong,-Wall \
  $(foreach a,$(CUDA_ARCH),$(if $(filter compute_%,$(a)),-gencode arch=$(a)$(,)code=$(a),-gencode arch=compute_$(a)$(,)code=sm_$(a)))
ifneq ($(CUDA_SRC),)
CPPFLAGS += -DMM_CUDA
LD = $(CXX)
LDFLAGS += -static-libstdc++ -static-libgcc
LIBS += -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt
endif
endif

# ---- layers, lowest first; a program or test links the layers it may include, highest first

LAYERS = formats quant loader convert runtime
src_of = $(filter-out $(1)/minimax_%,$(wildcard $(1)/*.c $(1)/*/*.c $(1)/*/*/*.c))
obj_of = $(patsubst %,$(BUILD)/%.o,$(basename $(call src_of,$(1))) $(if $(filter runtime1,$(1)$(CUDA)),$(CUDA_SRC)))
lib = $(BUILD)/lib$(1).a
LIBS_formats = $(call lib,formats)
LIBS_quant = $(call lib,quant) $(LIBS_formats)
LIBS_loader = $(call lib,loader) $(LIBS_quant)
LIBS_convert = $(call lib,convert) $(LIBS_loader)
LIBS_runtime = $(call lib,runtime) $(LIBS_loader)
LIBS_all = $(call lib,runtime) $(LIBS_convert)

PROGRAM_SRC = $(wildcard */minimax_*.c)
UNIT_SRC = $(wildcard tests/unit/*/test_*.c)
MODEL_SRC = $(filter-out tests/ops/cpu_blocks.c,$(wildcard tests/model/*.c tests/ops/*.c tests/fault/*.c tests/interop/*.c))
PRELOAD_SRC = $(wildcard tests/*/preload/*.c)
BENCH_SRC = $(wildcard tests/bench/bench_*.c)
FUZZ_SRC = $(wildcard tests/fuzz/fuzz_*.c)
program_of = $(BUILD)/bin/$(patsubst minimax-command,minimax,$(subst _,-,$(basename $(notdir $(1)))))
PROGRAMS = $(foreach p,$(PROGRAM_SRC),$(call program_of,$(p)))
UNIT = $(UNIT_SRC:%.c=$(BUILD)/%)
MODEL = $(MODEL_SRC:%.c=$(BUILD)/%)
PRELOAD = $(PRELOAD_SRC:%.c=$(BUILD)/%.so)
BENCH = $(BENCH_SRC:%.c=$(BUILD)/%)
NO_HASH = $(BUILD)/tests/bench/no_hash
LIB_SO = $(BUILD)/lib/libminimax.so.$(VERSION)
LIBRARY = $(LIB_SO) $(BUILD)/lib/libminimax.a

all: $(PROGRAMS) $(if $(filter 0,$(SAN)),$(LIBRARY)) ## build the programs into build/bin, the library into build/lib
	@echo "$(if $(filter 1,$(CUDA)),CUDA backend: built with $(NVCC),CUDA backend: not built ($(if $(NVCC),CUDA=0,no nvcc found)))"
	@$(if $(LIBEDIT_LIBS),:,echo "libedit: not linked, minimax-run --chat does not edit lines (LIBEDIT=$(LIBEDIT))")
tests: $(UNIT) $(MODEL) $(PRELOAD) $(BUILD)/tests/ops/cpu_blocks.o

link = $(Q)$(call said,link $@) mkdir -p $(@D) && $(LD) $(LDFLAGS) $(filter-out $(BUILD)/flags,$^) $(LIBS)

# Everything is compiled again when the compiler or a flag changes.
LIB_FLAGS = -fPIC -fvisibility=hidden
FLAGS = $(CC) $(CPPFLAGS) $(CFLAGS) $(LIB_FLAGS) $(LDFLAGS) $(LIBS) $(LIBEDIT_LIBS) $(NVCCFLAGS)
# Programs hold within a small stack (ulimit -s): what is large lies on the heap. Sanitizers and -O0 make frames of their own sizes.
FRAME = $(if $(filter 1,$(FAST))$(filter-out 0,$(SAN)),,-Wframe-larger-than=18432)
$(patsubst %,$(BUILD)/%/%.o,$(LAYERS)): private CFLAGS += $(FRAME)
$(BUILD)/flags: FORCE
	@mkdir -p $(@D) && echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(call said,compile $<) $(CC) $(CPPFLAGS) $(CFLAGS) -c $< -o $@
# Loops for every kind of codes and inputs, unrolled: most of the time that compilers take is theirs. Addresses are still watched.
$(BUILD)/runtime/cpu/cpu_rows_%.o: private CFLAGS += -g1 $(if $(filter 1,$(SAN)),-fno-sanitize=pointer-overflow$(,)alignment$(,)null$(,)object-size)
$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(call said,compile $<) $(NVCC) $(NVCCFLAGS) -c $< -o $@

# --version has the commit and the GPU architectures: this file is compiled again when they change.
$(BUILD)/commit: FORCE
	@mkdir -p $(@D) && echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@
$(BUILD)/formats/system/version.o $(BUILD)/pic/formats/system/version.o: private CPPFLAGS += $(if $(COMMIT),-DMM_COMMIT='"$(COMMIT)"')
$(BUILD)/formats/system/version.o: private CPPFLAGS += -DMM_CUDA_ARCH='"$(CUDA_ARCH)"'
$(BUILD)/pic/formats/system/version.o: private CPPFLAGS += -UMM_CUDA # the library has no GPU code
$(BUILD)/formats/system/version.o $(BUILD)/pic/formats/system/version.o: $(BUILD)/commit
$(BUILD)/runtime/serve/page.o: runtime/serve/page.html
ifneq ($(LIBEDIT_LIBS),)
$(BUILD)/runtime/chat/line_edit.o: private CPPFLAGS += -DMM_LIBEDIT $(shell pkg-config --cflags libedit)
# Only the program that uses it: a static libevent would take functions of libbsd, which libedit brings, in place of the C library's.
$(BUILD)/bin/minimax-run: private LIBS := $(LIBEDIT_LIBS) $(LIBS)
endif

define layer_rule
$(call lib,$(1)): $(call obj_of,$(1))
	@mkdir -p $$(@D)
	$(Q)rm -f $$@ && ar rcsD $$@ $$^
$(BUILD)/tests/unit/$(1)/%: $(BUILD)/tests/unit/$(1)/%.o $$(LIBS_$(1))
	$$(link) -lcmocka -o $$@
endef
$(foreach f,$(LAYERS),$(eval $(call layer_rule,$(f))))

define program_rule
$(call program_of,$(1)): $(BUILD)/$(1:.c=.o) $(LIBS_all)
	$$(link) -o $$@
endef
$(foreach p,$(PROGRAM_SRC),$(eval $(call program_rule,$(p))))

# The backend's host side over a runtime without a device (tests/ops/fake_device.h).
ifeq ($(CUDA),1)
$(BUILD)/tests/ops/host.o $(BUILD)/tests/ops/host_fixture.o: private CPPFLAGS += -isystem $(CUDA_HOME)/include
$(BUILD)/tests/ops/host $(BUILD)/tests/ops/host_fixture: private LIBS := $(filter-out -lcudart_static,$(LIBS))
endif
$(BUILD)/tests/fault/failing_engine: private LIBS := -Wl,--wrap=mm_ops_find $(LIBS)
$(MODEL): $(BUILD)/%: $(BUILD)/%.o $(LIBS_all)
	$(link) -lcmocka -o $@
$(PRELOAD): $(BUILD)/%.so: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(call said,compile $<) $(CC) -std=c11 -D_GNU_SOURCE -O2 $(WARN) -fPIC -shared $< -o $@
$(BENCH): $(BUILD)/%: $(BUILD)/%.o $(LIBS_all)
	$(link) -o $@
$(NO_HASH): $(NO_HASH).o $(BUILD)/convert/minimax_convert.o $(LIBS_all)
	$(link) -o $@

# ---- libminimax: loader and below, position independent; nothing of it is visible but loader/minimax.h

LIB_SONAME = libminimax.so.0
# The programs' objects are the library's, too, but for the version, which says what was built.
LIB_OBJ = $(patsubst $(BUILD)/formats/system/version.o,$(BUILD)/pic/formats/system/version.o,$(foreach f,formats quant loader,$(call obj_of,$(f))))
$(foreach f,formats quant loader,$(call obj_of,$(f))): private CFLAGS += $(LIB_FLAGS)
LIB_LIBS := $(shell pkg-config --libs libcrypto libzstd)
ifeq ($(STATIC),1)
LIB_LIBS := -Wl,-Bstatic $(LIB_LIBS) -Wl,-Bdynamic -Wl,--exclude-libs,ALL
endif
LIB_LIBS += -lm -lpthread
$(BUILD)/pic/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(call said,compile $<) $(CC) $(CPPFLAGS) $(CFLAGS) $(LIB_FLAGS) -c $< -o $@
$(BUILD)/pic/libminimax.a: $(LIB_OBJ)
	$(Q)rm -f $@ && ar rcsD $@ $^
$(LIB_SO): $(BUILD)/loader/library.o $(BUILD)/pic/libminimax.a
	@mkdir -p $(@D)
	$(Q)$(call said,link $@) $(CC) -shared $(filter-out -pie,$(LDFLAGS)) -Wl,-soname,$(LIB_SONAME) -Wl,--as-needed -Wl,--no-undefined $^ $(LIB_LIBS) -o $@
	$(Q)ln -sf $(@F) $(@D)/$(LIB_SONAME) && ln -sf $(@F) $(@D)/libminimax.so
# One object, in which only what is public keeps a name for others.
$(BUILD)/lib/libminimax.a: $(BUILD)/loader/library.o $(BUILD)/pic/libminimax.a
	@mkdir -p $(@D)
	$(Q)$(CC) -r -nostdlib $^ -o $(BUILD)/pic/libminimax.o && objcopy --localize-hidden $(BUILD)/pic/libminimax.o
	$(Q)rm -f $@ && ar rcsD $@ $(BUILD)/pic/libminimax.o
library: $(LIBRARY) ## libminimax, shared and static, into build/lib

include tests/tests.mk

# ---- the tree

demo: $(PROGRAMS) ## convert, verify, list and run the two small checkpoints
	$(Q)scripts/demo.sh $(BUILD)
exact: $(BUILD)/tests/interop/quant_codes $(VENV)/ready ## casts of all 2^32 numbers to every format, compared with ml_dtypes (minutes)
	$(Q)BUILD=$(BUILD) $(VENV)/bin/python tests/interop/quant_oracles.py --all
bench-quant: $(BUILD)/tests/bench/bench_quant ## GB/s of every scheme, search and SIMD level, with memcpy of the same run
	$(Q)$<
bench-cpu: $(BUILD)/tests/bench/bench_cpu $(BUILD)/tests/bench/bench_rows ## tokens/s of the CPU backend on layers of M2's and M1's widths, with the memory's rate; a core's ceilings
	$(Q)$(BUILD)/tests/bench/bench_rows
	$(Q)$< m2
	$(Q)$< m1
bench-quality: $(PROGRAMS) $(BUILD)/tests/bench/bench_quality $(VENV)/ready ## SQNR gains of the searches, likelihood of the small checkpoints by scheme
	$(Q)$(BUILD)/tests/bench/bench_quality
	$(Q)$(VENV)/bin/python tests/bench/quality.py $(BUILD)/bin
bench-serve: $(PROGRAMS) $(addprefix $(BUILD)/tests/bench/bench_,scheduler reuse tokenizer masks) ## minimax-serve: its start, streams over HTTP and of the engine alone, a prompt that is known, masks
	$(Q)python3 tests/bench/serve.py $(BUILD)
	$(Q)$(BUILD)/tests/bench/bench_masks
bench: $(PROGRAMS) $(BENCH) $(NO_HASH) ## conversion rates, with memcpy and the disk of the same run
	$(Q)scripts/bench_convert.py $(BUILD)/bin
	$(Q)for b in $(BENCH); do $$b || exit 1; done

SOURCES = $(shell find formats quant loader convert runtime tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
lint: lint-format lint-tree lint-words lint-tidy ## format, clang-tidy, layers, rooms, sizes, words
# Other versions of clang want another format and find other things: a line says so in place of the check.
CLANG_VERSION = 14
pinned = found=$$($(1) --version | sed -n 's/.*version \([0-9]*\).*/\1/p'); \
  [ "$$found" = $(CLANG_VERSION) ] || { echo "lint: $(1) not run: found version $$found, expected $(CLANG_VERSION)"; exit 0; }
lint-format:
	$(Q)$(call pinned,clang-format); clang-format --dry-run -Werror $(SOURCES)
lint-tree:
	$(Q)scripts/layers.sh && scripts/tree.sh && scripts/rooms.py && scripts/limits.py
lint-words: ## words of comments, names and types
	$(Q)scripts/words.py
# The analyser's steps in a function: a twelfth of what it takes by itself. What it finds at 60,000 at the end of long functions, it finds.
#: TIDY_NODES=N    steps of the analyser in a function; make check takes 8000, in less time
TIDY_NODES ?= 20000
TIDY_DEPTH = $(patsubst %,--extra-arg=%,-Xclang -analyzer-config -Xclang max-nodes=$(TIDY_NODES))
lint-tidy:
	$(Q)$(call pinned,clang-tidy); printf '%s\n' $(filter %.c,$(SOURCES)) | xargs -P $(shell nproc) -I{} sh -c 'said=$$(clang-tidy --quiet $(TIDY_DEPTH) {} -- -std=c11 -D_GNU_SOURCE -I. \
	  -Iloader $(PKG_CFLAGS) 2>&1 | grep -vE "^[0-9]+ warnings? generated"); [ -z "$$said" ] || printf "%s\n" "$$said"' | { ! grep .; }
format: ## rewrite the sources in the house style
	$(Q)$(call pinned,clang-format); clang-format -i $(SOURCES)

# What is installed names its own place, which a relative path is not.
absolute = $(if $(filter-out /%,$(firstword $(PREFIX))),$(error PREFIX: found "$(PREFIX)", expected an absolute path))
install: all ## programs, library, man pages and shell completions below PREFIX
	$(absolute)$(Q)scripts/install.sh "$(DESTDIR)$(PREFIX)" $(PROGRAMS)
	$(Q)scripts/install_library.sh "$(DESTDIR)$(PREFIX)" "$(PREFIX)" $(LIB_SO)
	$(Q)scripts/install_unit.sh "$(DESTDIR)$(PREFIX)" "$(PREFIX)"
uninstall: ## what install put below PREFIX
	$(absolute)$(Q)scripts/install_unit.sh --remove "$(DESTDIR)$(PREFIX)" "$(PREFIX)"
	$(Q)scripts/install_library.sh --remove "$(DESTDIR)$(PREFIX)" "$(PREFIX)" $(LIB_SO)
	$(Q)scripts/install.sh --remove "$(DESTDIR)$(PREFIX)" $(PROGRAMS)
dist: ## the committed tree as build/minimax-VERSION.tar.gz
	$(Q)scripts/dist.sh $(VERSION) $(abspath $(BUILD))/minimax-$(VERSION).tar.gz
#: TAG=0           make release without the tag; ROOT="DIR…": bare roots for its tests, named for their releases, made by debootstrap if absent (bookworm, trixie, noble)
release: ## tarball, .deb packages and wheel into build/release, tried in a bare root, then the tag vVERSION
	$(Q)$(MAKE) --no-print-directory STATIC=1 BUILD=build/release all
	$(Q)scripts/package.sh build/release build/release/out
	$(Q)scripts/release_test.sh build/release/out $(ROOT)
	$(Q)$(if $(filter 0,$(TAG)),,scripts/tag.sh $(VERSION))
clean: ## remove what was built
	rm -rf $(BUILD)
help: ## this list
	@echo "targets"; sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile tests/tests.mk | expand -t 16
	@echo "switches"; sed -n 's/^#: /  /p' Makefile tests/tests.mk

-include $(LIB_OBJ:.o=.d) $(patsubst %,$(BUILD)/%.d,$(basename $(filter %.c,$(SOURCES))) $(filter %.cu,$(SOURCES)))
.DELETE_ON_ERROR:
FORCE:
.PHONY: FORCE all library tests check quick serve-check unit model cli valgrind check-san check-tsan check-clang fuzz fuzzers soak soak-fuzz soak-fuzz-build gpu demo engines exact bench \
  bench-quant bench-cpu bench-quality bench-serve lint format install uninstall dist release clean help \
  lint-format lint-tree lint-words lint-tidy $(T_UNIT) $(T_MODEL) $(T_SCRIPT) $(T_TREE) $(T_SAN) $(T_TSAN) $(T_CLANG) $(T_PLAIN) $(T_VALGRIND) $(T_FUZZ)
.SECONDARY:
