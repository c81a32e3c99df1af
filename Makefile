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

.PHONY: demo
demo: ## Show a frozen lock holder corrupt data, and fencing refuse it (needs only Go)
	@echo "demo: compiling"
	@$(GO) run ./cmd/demo $(ARGS)

# Tests get a directory of their own for temporary files, which goes whatever becomes of them.
.PHONY: test
test: ## Run the tests with the race detector (PKG=./... TESTFLAGS="-v -run TestX" FENCELAB_TESTBED=auto)
	@echo "test: compiling and running $(PKG)"
	@dir=$$(mktemp -d "$${TMPDIR:-/tmp}/fencelab.XXXXXX") || exit; \
	trap 'rm -rf "$$dir"' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM HUP; \
	TMPDIR=$$dir $(GO) test -race $(TESTFLAGS) $(PKG)

.PHONY: bench
bench: ## Run the benchmarks (PKG=./... BENCH=. TESTFLAGS="-count 6")
	@$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem $(TESTFLAGS) $(PKG)

.PHONY: check
check: $(LINT) ## Check modules, formatting, layers and lint, for Linux and macOS
	$(GO) mod tidy -diff
	$(LINT) config verify --schema bin/golangci-$(LINT_VERSION).schema.json
	$(LINT) fmt --diff
	$(GO) vet ./...
	GOOS=darwin $(GO) vet ./...
	$(LINT) run

$(LINT):
	@echo "check: building golangci-lint $(LINT_VERSION), once; this takes a few minutes"
	@GOBIN=$(CURDIR)/bin GOFLAGS= $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	@cp "$$($(GO) env GOMODCACHE)/github.com/golangci/golangci-lint/v2@$(LINT_VERSION)/jsonschema/golangci.next.jsonschema.json" \
		bin/golangci-$(LINT_VERSION).schema.json
	@chmod u+w bin/golangci-$(LINT_VERSION).schema.json
	@mv bin/golangci-lint $@

.PHONY: images
images: ## Build container images from Debian packages, for where no registry is reachable (as root)
	@testdata/images/build

.PHONY: clean
clean: ## Remove what make has made: tools and the choice of built images
	rm -rf bin testdata/images/images.env
