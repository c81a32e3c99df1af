package kubernetes_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// project is fixed, so that the next run removes what a killed one has left.
const project = "fencelab-check"

const pods = 3

// TestCompose runs the compose file's contenders, workers and resource, checks every query of the dashboard while
// Prometheus scrapes them, and merges the contenders' results.
func TestCompose(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c := newCompose(ctx, t)
	c.down(t)
	t.Cleanup(func() { c.down(t) })

	profiles := []string{"--profile", "contend", "--profile", "worker"}
	if c.envFiles == nil && os.Getenv("FENCELAB_COMMANDS_IMAGE") == "" {
		c.run(ctx, t, append(profiles, "build", "contend")...)
	}
	c.run(ctx, t, append(profiles, "up", "-d", "redis", "resource", "contend-prometheus")...)
	start := "FENCELAB_START_AT=" + time.Now().Add(20*time.Second).UTC().Format(time.RFC3339)
	c.env = append(c.env, start)
	c.run(ctx, t, append(profiles, "up", "-d", "--scale", "contend="+strconv.Itoa(pods), "--scale", "worker=2", "contend", "worker")...)
	// Holding for longer than the lease, so that leases are lost and releases fail.
	c.run(ctx, t, append(profiles, "run", "-d", "--no-deps", "--use-aliases", "-e", "FENCELAB_TTL=20ms", "-e", "FENCELAB_WORK=50ms",
		"-e", "FENCELAB_PREFIX=lost/", "-e", start, "contend")...)
	ids := strings.Fields(c.run(ctx, t, append(profiles, "ps", "-q", "contend")...))
	ended := make(chan error, 1)
	go func() { ended <- exec.CommandContext(ctx, "docker", append([]string{"wait"}, ids...)...).Run() }()

	addr := strings.TrimSpace(c.run(ctx, t, append(profiles, "port", "contend-prometheus", "9090")...))
	prometheus := prometheus{ctx, "http://" + addr}
	missing := map[string]string{"all are scraped": fmt.Sprintf("count(contend_sections_total) >= %d", pods+1)}
	for _, p := range readDashboard(t).Panels {
		for _, q := range p.Targets {
			missing[p.Title+" "+q.RefID] = atInterval(q.Expr, "4s")
		}
	}
	said := ""
	for over := false; len(missing) > 0; {
		if over {
			logs := c.run(ctx, t, append(profiles, "logs", "--no-color", "--tail", "3", "contend")...)
			t.Fatalf("the run is over, and Prometheus had no data for %q (%s); the contenders have said:\n%s", missing, said, abridged(logs))
		}
		for title, expr := range missing {
			ok, err := prometheus.has(expr)
			if ok {
				delete(missing, title)
			}
			if err != nil {
				said = err.Error()
			}
		}
		select {
		case err := <-ended:
			require.NoError(t, err)
			over = true
			ended <- nil
		case <-time.After(200 * time.Millisecond):
		}
	}
	// All has been seen. Interrupted, a contender prints what it has measured.
	require.NoError(t, exec.CommandContext(ctx, "docker", append([]string{"kill", "--signal", "INT"}, ids...)...).Run())
	require.NoError(t, <-ended)

	merge := exec.CommandContext(ctx, "go", "run", "./cmd/contend", "-merge", "-", "-o", "-")
	merge.Dir = c.dir
	logs := c.run(ctx, t, append(profiles, "logs", "--no-color", "contend")...)
	merge.Stdin = strings.NewReader(logs)
	var stderr bytes.Buffer
	merge.Stderr = &stderr
	out, err := merge.Output()
	require.NoError(t, err, "%s\n%s", &stderr, logs)
	var result struct {
		Config struct {
			Processes, Contenders int
		}
		Sections int64
		Wait     struct{ Count int64 }
		Checks   map[string]int64
	}
	require.NoError(t, json.Unmarshal(out, &result))
	require.Equal(t, pods, result.Config.Processes)
	require.Equal(t, pods*10, result.Config.Contenders)
	require.Positive(t, result.Sections)
	require.Equal(t, result.Sections, result.Wait.Count)
	require.Equal(t, map[string]int64{"overlaps": 0, "token_regressions": 0, "late": 0}, result.Checks)
}

// abridged cuts long lines, which are results.
func abridged(log string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if len(line) > 200 {
			line = line[:200] + "...\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

type prometheus struct {
	ctx context.Context
	url string
}

// has reports whether a query has a number for now.
func (p prometheus) has(expr string) (bool, error) {
	req, err := http.NewRequestWithContext(p.ctx, http.MethodGet, p.url+"/api/v1/query?query="+url.QueryEscape(expr), nil)
	if err != nil {
		return false, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }() // it has been read
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
	if err := json.Unmarshal(b, &answer); err != nil {
		return false, fmt.Errorf("%s: %w", b, err)
	}
	if answer.Error != "" {
		return false, fmt.Errorf("%s: %s", expr, answer.Error)
	}
	for _, r := range answer.Data.Result {
		if s, ok := r.Value[1].(string); ok && s != "NaN" {
			return true, nil
		}
	}
	return false, nil
}

type compose struct {
	command  []string
	dir      string
	env      []string
	envFiles []string
}

// newCompose skips the test without Docker, unless FENCELAB_STRICT is set.
func newCompose(ctx context.Context, t *testing.T) *compose {
	t.Helper()
	c := &compose{dir: "../..", env: []string{
		"FENCELAB_REDIS_PORT=0", "FENCELAB_PROMETHEUS_PORT=0", "FENCELAB_CONTENDERS=10", "FENCELAB_WARMUP=1s", "FENCELAB_DURATION=3m",
	}}
	for _, command := range [][]string{{"docker", "compose"}, {"docker-compose"}} {
		if exec.CommandContext(ctx, command[0], append(command[1:], "version")...).Run() == nil {
			c.command = command
		}
	}
	missing := ""
	switch {
	case c.command == nil:
		missing = "there is neither docker compose nor docker-compose: sudo apt-get install docker-compose"
	case exec.CommandContext(ctx, "docker", "version").Run() != nil:
		missing = "no Docker engine answers: sudo systemctl start docker"
	}
	if _, err := os.Stat("../../testdata/images/images.env"); err == nil {
		c.envFiles = []string{"--env-file", "testdata/images/images.env"}
	} else if missing == "" {
		pull := exec.CommandContext(ctx, c.command[0], append(c.command[1:], "-f", "deploy/compose.yaml", "pull", "redis")...)
		pull.Dir = c.dir
		if out, err := pull.CombinedOutput(); err != nil {
			missing = fmt.Sprintf("images cannot be pulled (%s): sudo make images builds them", lastLine(string(out)))
		}
	}
	if missing != "" && os.Getenv("FENCELAB_STRICT") == "1" {
		t.Fatal(missing)
	}
	if missing != "" {
		t.Skip(missing)
	}
	return c
}

// The last line says why a command failed.
func lastLine(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

func (c *compose) run(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	all := append(append(append([]string{}, c.command[1:]...), c.envFiles...), "-f", "deploy/compose.yaml", "-p", project)
	cmd := exec.CommandContext(ctx, c.command[0], append(all, args...)...)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), c.env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(t, cmd.Run(), "%v: %s", args, &stderr)
	return stdout.String()
}

// down removes everything, and checks that it is gone.
func (c *compose) down(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	c.run(ctx, t, "--profile", "contend", "--profile", "worker", "down", "--volumes", "--remove-orphans", "--timeout", "2")
	for _, list := range []string{"ps -aq", "network ls -q", "volume ls -q"} {
		args := append(strings.Fields(list), "--filter", "label=com.docker.compose.project="+project)
		out, err := exec.CommandContext(ctx, "docker", args...).Output()
		require.NoError(t, err)
		require.Empty(t, strings.TrimSpace(string(out)), "docker %s", list)
	}
}
