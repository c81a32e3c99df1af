# GNU make 3.81 (that of macOS) or later.
GO           ?= go
PKG          ?= ./...
BENCH        ?= .
LINT_VERSION := v2.11.4
LINT         := bin/golangci-lint-$(LINT_VERSION)

# The images that `make images` has built are used, unless the environment says otherwise.
$(foreach kv,$(shell cat testdata/images/images.env 2>/dev/null),$(eval export $(subst =, ?= ,$(kv))))

.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The modules of what is to be compiled, so that a machine without a network gets one error and not one a package.
.PHONY: modules
compiled = ./cmd/demo
test: compiled = -test $(filter-out -%,$(PKG))
modules:
	@command -v $(GO) >/dev/null || { echo "make: there is no $(GO) command; install Go from https://go.dev/dl" >&2; exit 1; }
	@GOPROXY=off $(GO) list -deps $(compiled) 2>&1 >/dev/null | grep -q -E 'GOPROXY=off|^go: ' || exit 0; \
	echo "make: downloading Go modules"; errors=$$($(GO) list -deps $(compiled) 2>&1 >/dev/null) || { \
		printf '%s\n' "$$errors" | grep -v '^go: downloading' | head -n 1 >&2; \
		echo "make: Go can't get modules; they come from GOPROXY=$$($(GO) env GOPROXY), and go to $$($(GO) env GOMODCACHE)" >&2; exit 1; }

.PHONY: demo
demo: modules ## Show a frozen lock holder corrupt data, and fencing refuse it (Linux; needs only Go)
	@echo "demo: compiling, the first time for about a minute"
	@$(GO) run -gcflags=all=-l ./cmd/demo $(ARGS)

.PHONY: setup
setup: ## Get the servers that tests run against, as far as this machine allows (SERVERS=all SETUP=off FENCELAB_TESTBED=auto)
	@testdata/setup

# What setup has chosen, unless the environment says otherwise.
testbed = $(or $(filter-out auto,$(FENCELAB_TESTBED)),$(shell cat bin/testbed 2>/dev/null),auto)

# Tests get a directory of their own for temporary files, which goes whatever becomes of them. The scenarios wait most of the
# time; they come first, so that the other packages' tests have the cores meanwhile. No package may come after a test's own flag.
# `make check` vets.
.PHONY: test
test: modules setup ## Set up, run the tests, and say what ran (PKG=./... RACE=off TESTFLAGS="-v -run TestX" SERVERS=all SETUP=off)
	@$(MAKE) --no-print-directory run-tests

.PHONY: run-tests
run-tests:
	@echo "test: compiling and running $(PKG); servers: $(testbed)"
	@dir=$$(mktemp -d "$${TMPDIR:-/tmp}/fencelab.XXXXXX") || exit; \
	trap 'rm -rf "$$dir" || { sleep 2; rm -rf "$$dir"; }' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM HUP; \
	$(GO) build -buildvcs=false -o "$$dir/suite" ./internal/suite || exit; \
	TMPDIR=$$dir FENCELAB_TESTBED=$(testbed) "$$dir/suite" -vet=off $(if $(filter on,$(RACE)),-race) -timeout 30m -parallel 4 \
		$(if $(filter ./...,$(PKG)),./scenarios/...) $(PKG) $(TESTFLAGS) & pid=$$!; \
	trap 'wait $$pid; exit 130' INT; trap 'kill $$pid; wait $$pid; exit 143' TERM HUP; \
	wait $$pid

.PHONY: bench
bench: setup ## Run the benchmarks (PKG=./... BENCH=. TESTFLAGS="-count 6")
	@FENCELAB_TESTBED=$(testbed) $(GO) test -run '^$$' -bench '$(BENCH)' -benchmem $(PKG) $(TESTFLAGS)

.PHONY: explore
explore: setup ## Run random schedules over all locks in virtual time, and known ones on a real Redis (SECONDS=60 SEED=N STEPS=24), or only over LOCK=redislock
	@FENCELAB_TESTBED=$(testbed) $(GO) test ./scenarios/explore -tags replay -count=1 -timeout 0 -v -run '$(if $(LOCK),TestExplore,TestExplore|TestReproducible|TestReplay)' \
		-args -for $(or $(SECONDS),60)s -seed $(or $(SEED),$(shell date +%s)) -steps $(or $(STEPS),24) -lock '$(LOCK)'

.PHONY: fuzz
fuzz: ## Fuzz the parsers, the HTTP handler, the record format and the judge (SECONDS=10 for each)
	@grep -rn '^func Fuzz' --include='*_test.go' . | sed 's|/[^/]*_test.go:.*func \(Fuzz[A-Za-z]*\)(.*| \1|' | while read -r package name; do \
		$(GO) test "$$package" -run '^$$' -fuzz "^$$name$$" -fuzztime $(or $(SECONDS),10)s || exit; \
	done

# Tables that tests make are written first; a claim that the data doesn't bear out fails, and the site is built all the same.
.PHONY: report
report: ## Regenerate charts and tables of the recorded results from their data, and build the site (site/index.html)
	@$(GO) test -count=1 -run 'Table|Results|Matrix|Keys|Costs|Swap|Stores|Timeline|Pictures' ./reports -update; status=$$?; \
	$(GO) run ./cmd/report -site site && exit $$status

.PHONY: check
check: $(LINT) bin/typecheck ## Check modules, formatting, layers and lint, and types on macOS
	$(GO) mod tidy -diff
	$(LINT) config verify --schema bin/golangci-$(LINT_VERSION).schema.json
	$(LINT) fmt --diff
	GOOS=darwin bin/typecheck
	$(LINT) run

bin/typecheck: $(wildcard testdata/typecheck/*)
	@mkdir -p bin
	@cd testdata/typecheck && $(GO) build -buildvcs=false -o "$(CURDIR)/$@" .

$(LINT):
	@echo "check: building golangci-lint $(LINT_VERSION), once; this takes a few minutes"
	@GOBIN="$(CURDIR)/bin" GOFLAGS= $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	@cp "$$($(GO) env GOMODCACHE)/github.com/golangci/golangci-lint/v2@$(LINT_VERSION)/jsonschema/golangci.next.jsonschema.json" \
		bin/golangci-$(LINT_VERSION).schema.json
	@chmod u+w bin/golangci-$(LINT_VERSION).schema.json
	@mv bin/golangci-lint $@

# $(call build-server,NAME,PROGRAM=PACKAGE ...,HOW LONG) builds what the module testdata/servers/NAME pins, so that it
# also runs in an image that holds nothing else, and for root in another user's clone, where git refuses. The last program stands
# for all, so it is built last.
define build-server
@echo "servers: building $(1) from source, once; this takes $(3)"
@mkdir -p bin
@start=$$(date +%s) && cd testdata/servers/$(1) && for server in $(2); do \
	CGO_ENABLED=0 GOFLAGS= $(GO) build -trimpath -buildvcs=false -ldflags='-s -w' -o "$(CURDIR)/bin/$${server%%=*}" "$${server#*=}" || exit; \
done && echo "servers: built $(1) in $$(($$(date +%s) - start)) s"
endef

.PHONY: servers
servers: bin/etcd bin/versitygw bin/minidyn $(if $(filter all,$(SERVERS)),bin/consul) ## Build servers that no package provides from source (SERVERS=all: Consul too, for minutes)

bin/etcd: testdata/servers/etcd/go.mod testdata/servers/etcd/go.sum
	$(call build-server,etcd,etcdutl=go.etcd.io/etcd/etcdutl/v3 etcd=go.etcd.io/etcd/server/v3,about a minute)

bin/consul: testdata/servers/consul/go.mod testdata/servers/consul/go.sum
	$(call build-server,consul,consul=github.com/hashicorp/consul,a few minutes)

bin/versitygw: testdata/servers/versitygw/go.mod testdata/servers/versitygw/go.sum
	$(call build-server,versitygw,versitygw=github.com/versity/versitygw/cmd/versitygw,about two minutes)

bin/minidyn: $(wildcard testdata/servers/minidyn/*)
	$(call build-server,minidyn,minidyn=.,some seconds)

.PHONY: images
images: servers ## Build container images, for where no registry is reachable (as root)
	@testdata/images/build

.PHONY: fleet
fleet: ## Run load, workers, a resource and Prometheus in containers, and check the dashboard's queries (needs Docker)
	@echo "fleet: running the compose file takes Docker, Compose and images"
	@$(GO) test -count=1 -v -tags fleet $(TESTFLAGS) ./deploy

.PHONY: clean
clean: ## Remove what make has made: tools, servers, and what setup has chosen
	rm -rf bin testdata/images/images.env
