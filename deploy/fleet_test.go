//go:build fleet

// Package deploy_test runs deploy/compose.yaml, for make fleet.
package deploy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// project is fixed, so that the next run removes what a killed one has left.
const project = "fencelab-check"

// TestCompose runs contenders, workers and a resource in containers until Prometheus has data for every query of Grafana's
// dashboard.
func TestCompose(t *testing.T) {
	compose := composeOrSkip(t)
	profiles := []string{"--profile", "contend", "--profile", "worker"}
	down := func() {
		compose(append(profiles, "down", "--volumes", "--remove-orphans", "--timeout", "2")...)
		for _, list := range []string{"ps -aq", "network ls -q", "volume ls -q"} {
			out, err := exec.Command("docker", append(strings.Fields(list), "--filter", "label=com.docker.compose.project="+project)...).Output()
			require.NoError(t, err)
			require.Empty(t, strings.TrimSpace(string(out)), "docker %s", list)
		}
	}
	down()
	t.Cleanup(down)
	if os.Getenv("FENCELAB_COMMANDS_IMAGE") == "" && imagesEnv() == nil {
		compose(append(profiles, "build", "contend")...)
	}
	compose(append(profiles, "up", "-d", "--scale", "contend=3", "--scale", "worker=2", "redis", "resource", "contend-prometheus", "contend", "worker")...)
	// Holding for longer than the lease, so that leases are lost and releases fail.
	compose(append(profiles, "run", "-d", "--no-deps", "--use-aliases", "-e", "FENCELAB_TTL=20ms", "-e", "FENCELAB_WORK=50ms", "-e", "FENCELAB_PREFIX=lost/", "contend")...)

	prometheus := "http://" + strings.TrimSpace(compose(append(profiles, "port", "contend-prometheus", "9090")...))
	missing := map[string]string{"all are scraped": "count(contend_sections_total) >= 4"}
	for title, expr := range queries(t) {
		missing[title] = expr
	}
	var said error
	for began := time.Now(); len(missing) > 0; time.Sleep(200 * time.Millisecond) {
		for title, expr := range missing {
			ok, err := has(prometheus, expr)
			if ok {
				delete(missing, title)
			}
			if err != nil {
				said = err
			}
		}
		if time.Since(began) > 3*time.Minute {
			t.Fatalf("Prometheus has no data for %q (%v); the containers have said:\n%s", missing, said, compose(append(profiles, "logs", "--no-color", "--tail", "3")...))
		}
	}
}

// queries returns the dashboard's queries, by panel.
func queries(t *testing.T) map[string]string {
	t.Helper()
	b, err := os.ReadFile("grafana/fencelab.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ RefID, Expr string }
		}
	}
	require.NoError(t, json.Unmarshal(b, &dashboard))
	all := map[string]string{}
	for _, p := range dashboard.Panels {
		for _, q := range p.Targets {
			all[p.Title+" "+q.RefID] = strings.ReplaceAll(q.Expr, "$__rate_interval", "4s")
		}
	}
	require.NotEmpty(t, all)
	return all
}

// has reports whether a query has a number for now.
func has(prometheus, expr string) (bool, error) {
	resp, err := http.Get(prometheus + "/api/v1/query?query=" + url.QueryEscape(expr)) //nolint:noctx // as long as the test
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return false, err
	}
	var answer struct {
		Error string
		Data  struct {
			Result []struct{ Value [2]any }
		}
	}
	if err := json.Unmarshal(b, &answer); err != nil || answer.Error != "" {
		return false, fmt.Errorf("%s: %s", expr, b)
	}
	for _, r := range answer.Data.Result {
		if s, ok := r.Value[1].(string); ok && s != "NaN" {
			return true, nil
		}
	}
	return false, nil
}

func imagesEnv() []string {
	if _, err := os.Stat("../testdata/images/images.env"); err != nil {
		return nil
	}
	return []string{"--env-file", "../testdata/images/images.env"}
}

// composeOrSkip returns docker compose. Without Docker it skips the test, unless FENCELAB_STRICT is set.
func composeOrSkip(t *testing.T) func(args ...string) (stdout string) {
	t.Helper()
	var command []string
	for _, c := range [][]string{{"docker", "compose"}, {"docker-compose"}} {
		if exec.Command(c[0], append(c[1:], "version")...).Run() == nil {
			command = c
		}
	}
	run := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		args = append(append(append(command[1:len(command):len(command)], imagesEnv()...), "-f", "compose.yaml", "-p", project), args...)
		cmd := exec.CommandContext(ctx, command[0], args...)
		cmd.Env = append(os.Environ(), "FENCELAB_REDIS_PORT=0", "FENCELAB_PROMETHEUS_PORT=0", "FENCELAB_CONTENDERS=10", "FENCELAB_WARMUP=1s", "FENCELAB_DURATION=5m")
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%v: %w: %s", args, err, strings.TrimSpace(stderr.String()))
		}
		return string(out), err
	}
	missing := ""
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	switch {
	case command == nil:
		missing = "there is neither docker compose nor docker-compose: sudo apt-get install docker-compose"
	case exec.CommandContext(ctx, "docker", "version").Run() != nil:
		missing = "no Docker engine answers: sudo systemctl start docker"
	case imagesEnv() != nil && exec.Command("sh", "-c", `docker image inspect $(sed -n 's/.*_IMAGE=//p' "$0")`, imagesEnv()[1]).Run() != nil:
		missing = `the engine lacks images that testdata/images/images.env names: sudo env PATH="$PATH" make images builds them`
	case imagesEnv() == nil:
		if _, err := run("pull", "redis"); err != nil {
			missing = fmt.Sprintf("images cannot be pulled: sudo env PATH=\"$PATH\" make images builds them: %v", err)
		}
	}
	if missing != "" && os.Getenv("FENCELAB_STRICT") == "1" {
		t.Fatal(missing)
	}
	if missing != "" {
		t.Skip(missing)
	}
	return func(args ...string) string {
		t.Helper()
		out, err := run(args...)
		require.NoError(t, err)
		return out
	}
}
