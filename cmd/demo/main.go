// Command demo shows how a frozen holder corrupts data without fencing and is refused with it.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var command = cli.Command{
	Name: "demo",
	About: `
Runs one hazard with fencing off and with fencing on, on a real lock server and
with real processes, prints what happened side by side, and draws it to scale.

Redis comes from a container if a Docker engine answers, else from a local
redis-server, else from an embedded one that needs nothing but this program.`,
	Examples: `
  demo                                        # TTL 2 s, frozen for 5 s
  demo -scenario LateWriteBeforeSuccessorWrites -ttl 300ms -pause 0
  FENCELAB_REDIS_ADDR=localhost:6379 demo -testbed external`,
}

func main() {
	scenarios.ChildWithStore(onredis.Lock, onredis.Store)
	cli.Main(run)
}

func run(ctx context.Context, args []string, stdout io.Writer) (err error) {
	out := &printer{w: stdout}
	defer func() { err = errors.Join(err, out.err) }()
	var fs flag.FlagSet
	name := fs.String("scenario", "PauseExceedsTTL", "`hazard` to run: "+strings.Join(names(), ", "))
	ttl := fs.Duration("ttl", 2*time.Second, "lease TTL of the worker that the fault hits")
	pause := fs.Duration("pause", 5*time.Second, "minimum duration of the freeze or network delay; 0: no minimum, the scenario's steps decide")
	provider := cli.Choice(&fs, "testbed", "where Redis comes from",
		string(testbed.Auto), string(testbed.Containers), string(testbed.Local), string(testbed.External), string(testbed.Embedded))
	page := fs.String("o", "fencelab-demo.html", "`file` for the timeline")
	record := fs.String("record", "", "`directory` for the histories, as JSON lines; empty: don't record")
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	s, ok := scenarios.Hazard(*name)
	if !ok || !slices.Contains(names(), *name) {
		return fmt.Errorf("demo: unknown hazard %q; want one of %s", *name, strings.Join(names(), ", "))
	}

	switch {
	case *ttl < time.Millisecond:
		return fmt.Errorf("demo: -ttl is %v; it must be at least 1ms", *ttl)
	case *pause != 0 && *pause <= *ttl:
		return fmt.Errorf("demo: -pause is %v; it must exceed the -ttl of %v, or be 0", *pause, *ttl)
	}
	if err := cli.Replaceable(*page); err != nil {
		return fmt.Errorf("demo: %w; choose another file with -o", err)
	}
	if *record != "" {
		if err := os.MkdirAll(*record, 0o755); err != nil {
			return fmt.Errorf("demo: %w; choose another directory with -record", err)
		}
	}

	redis, err := testbed.StartRedis(ctx, &testbed.Options{
		Provider: testbed.Provider(*provider), AllowEmbedded: true, Progress: out,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, redis.Close()) }()
	out.printf("%s\nThe lock: %s. The resource: a process of its own, durable. TTL %v, frozen for at least %v.\n",
		s.Hazard, redis, *ttl, *pause)

	var runs []reports.Run
	var unexpected []string
	for _, f := range []history.Fencing{history.FencingOff, history.FencingOn} {
		r := scenarios.Runner{Service: onredis.Service(redis), Store: onredis.Bolt, TTL: *ttl, Pause: *pause}
		r.Command = func(s scenarios.Scenario, _ history.Fencing) string {
			return fmt.Sprintf("go run ./cmd/demo -scenario %s -ttl %v -pause %v -testbed %s", s.Name, *ttl, *pause, redis.Provider)
		}
		out.printf("\nFencing %s\n", f)
		r.OnEvent = progress(out)
		o, err := r.Run(ctx, s, f)
		if err != nil {
			return err
		}
		runs = append(runs, reports.Run{Events: o.Events, Result: o.Result})
		if o.Verdict != s.Expect[f] {
			unexpected = append(unexpected, fmt.Sprintf("fencing %s is %v, expected %v: %s", f, o.Verdict, s.Expect[f], strings.Join(o.Findings, "; ")))
		}
		if *record != "" {
			file := filepath.Join(*record, s.Name+"_"+string(f)+".jsonl")
			if err := create(file, func(w io.Writer) error { return history.Encode(w, o.Events) }); err != nil {
				return fmt.Errorf("demo: -record: %w", err)
			}
		}
	}
	out.printf("\n%s", sideBySide(runs[0], runs[1]))
	if err := create(*page, func(w io.Writer) error { return reports.Timeline(w, runs...) }); err != nil {
		return fmt.Errorf("demo: -o: %w", err)
	}
	out.printf("\nThe timeline, to scale: %s\n", *page)
	if unexpected != nil {
		return fmt.Errorf("demo: unexpected verdict: %s", strings.Join(unexpected, "; "))
	}
	return nil
}

// printer prints until the first error, and keeps it.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) Write(b []byte) (int, error) {
	n, err := p.w.Write(b)
	p.err = cmp.Or(p.err, err)
	return n, err
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, _ = fmt.Fprintf(p, format, args...) // Write keeps the error
	}
}

// names returns the hazards on one Redis without a fault of the server.
func names() []string {
	var names []string
	for _, s := range scenarios.Hazards() {
		if s.On("redis") && !s.Faulty() {
			names = append(names, s.Name)
		}
	}
	return names
}

func progress(out *printer) func(history.Event) {
	var events []history.Event
	return func(e history.Event) {
		events = append(events, e)
		lines := history.Trace(events) // a token's rank depends on all grants
		if e.Kind == history.KindRun || e.Kind == history.KindEnd {
			return
		}
		out.printf("%7.3fs  %s\n", e.Time.Sub(events[0].Time).Seconds(), lines[len(lines)-1])
	}
}

// sideBySide shows where the traces and verdicts of two runs differ, and the findings.
func sideBySide(left, right reports.Run) string {
	l, r := column(left), column(right)
	width := 0
	for _, line := range l {
		width = max(width, utf8.RuneCountInString(line))
	}
	var b strings.Builder
	for i := range max(len(l), len(r)) {
		var x, y string
		if i < len(l) {
			x = l[i]
		}
		if i < len(r) {
			y = r[i]
		}
		mark := " "
		if x != y {
			mark = "≠"
		}
		b.WriteString(strings.TrimRight(fmt.Sprintf("%-*s  %s  %s", width, x, mark, y), " ") + "\n")
	}
	for _, run := range []reports.Run{left, right} {
		fmt.Fprintf(&b, "\nfencing %s: %s\n", run.Events[0].Run.Fencing, strings.Join(findings(run.Result), "\n"+strings.Repeat(" ", 13)))
	}
	return b.String()
}

func column(r reports.Run) []string {
	return append(history.Trace(r.Events), "verdict: "+strings.ToUpper(r.Result.Verdict.String()))
}

func findings(r history.Result) []string {
	if r.Verdict == history.Safe {
		return []string{fmt.Sprintf("%d stale writes accepted, %d refused, no accepted entry lost", r.Stale, r.Refused)}
	}
	return r.Findings
}

func create(path string, write func(io.Writer) error) error {
	var b bytes.Buffer
	if err := write(&b); err != nil {
		return err
	}
	return cli.ReplaceFile(path, b.Bytes())
}
