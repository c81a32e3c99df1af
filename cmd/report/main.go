// Command report judges and draws recorded histories, and regenerates charts and site of the recorded results.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/reports/site"
	"github.com/fencelab/fencelab/scenarios/history"
)

var command = cli.Command{
	Name: "report",
	Args: "history.jsonl...",
	About: `
Judges each history, prints the verdicts, and writes one HTML page that draws them
to scale. Runs of the same scenario share a time axis. "-" reads a history
from standard input. No server is needed.

With -matrix it writes a file with one JSON line per run instead of a page, and prints
the verdicts as a Markdown table of hazards and locks: ✕ violated, ✓ safe, ✓! safe
with the live holder refused, · not run, each with fencing off, on writes alone, and on.

With -jepsen it prints one history as a Jepsen history, for other people's checkers. Each
accepted write is a transaction that reads a list and appends to it.

With -site it reads the recorded results in the folder -results instead: it regenerates
their charts there, and writes a site of all pages to the given folder. Open
its index.html; no server is needed.

The exit code is 1 if a history with fencing on is violated, if any history is
inconclusive, if one can't be read, or if the page can't be written. Otherwise it is
0: runs without fencing, or with fencing on writes alone, are there to show what goes
wrong. The page is written whatever the verdicts are.`,
	Examples: `
  report run.jsonl
  report -o pause.html pause-off.jsonl pause-on.jsonl
  report -matrix runs.jsonl /tmp/histories/*.jsonl
  report -jepsen run.jsonl >run.edn
  report -site site`,
}

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	var fs flag.FlagSet
	out := fs.String("o", "timeline.html", "the `file` to write the page to")
	matrix := fs.String("matrix", "", "the `file` to write one line per run to, instead of a page")
	jepsen := fs.Bool("jepsen", false, "print one history in Jepsen's format (EDN) instead of writing a page: transactions for Elle's list-append checker")
	web := fs.String("site", "", "the `folder` to write a site of all recorded results to, instead of a page")
	results := fs.String("results", "reports/results", "the `folder` of the recorded results, for -site")
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	var err error
	switch {
	case *jepsen:
		err = export(fs.Args(), stdout)
	case *web == "":
		err = draw(ctx, fs.Args(), *matrix, *out, stdout)
	case fs.NArg() > 0 || *matrix != "":
		err = errors.New("-site shows the recorded results in -results: it takes neither histories nor -matrix")
	default:
		err = build(*results, *web, stdout)
	}
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

func draw(ctx context.Context, histories []string, matrix, out string, stdout io.Writer) error {
	if len(histories) == 0 {
		return errors.New("no history to read: name one or more files of events (report -h tells more)")
	}
	var (
		runs []reports.Run
		all  []reports.Summary
		bad  []string
	)
	for _, name := range histories {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		events, err := read(name)
		if err != nil {
			return err
		}
		r := reports.Run{Events: events, Result: history.Judge(events)}
		runs, all = append(runs, r), append(all, reports.Summarize(events))
		if matrix == "" {
			if _, err := io.WriteString(stdout, summary(name, r)); err != nil {
				return err
			}
		}
		if !expected(r) {
			bad = append(bad, fmt.Sprintf("%s is %s", name, r.Result.Verdict))
		}
	}

	var page bytes.Buffer
	said := "wrote " + out + "\n"
	if matrix != "" {
		var table strings.Builder
		reports.SortSummaries(all)
		if err := errors.Join(reports.EncodeSummaries(&page, all), reports.Matrix(&table, all, nil)); err != nil {
			return err
		}
		out, said = matrix, printable(table.String())
	} else if err := reports.Timeline(&page, runs...); err != nil {
		return err
	}
	if err := os.WriteFile(out, page.Bytes(), 0o644); err != nil {
		return err
	}
	if _, err := io.WriteString(stdout, said); err != nil {
		return err
	}
	if len(bad) > 0 {
		return errors.New(strings.Join(bad, "; "))
	}
	return nil
}

func read(name string) ([]history.Event, error) {
	b, err := cli.ReadFile(name)
	if err != nil {
		return nil, err
	}
	events, err := history.Decode(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return events, nil
}

func export(histories []string, stdout io.Writer) error {
	if len(histories) != 1 {
		return fmt.Errorf("-jepsen takes exactly one history, not %d", len(histories))
	}
	events, err := read(histories[0])
	if err != nil {
		return err
	}
	return history.EncodeJepsen(stdout, events)
}

func build(results, web string, stdout io.Writer) error {
	folder := os.DirFS(results)
	charts, _, err := site.Derive(folder)
	if err != nil {
		return fmt.Errorf("-results %s: %w", results, err)
	}
	changed, err := charts.Write(results)
	if err != nil {
		return err
	}
	files, err := site.HTML(folder)
	if err != nil {
		return fmt.Errorf("-results %s: %w; run it where that folder is, or name it with -results", results, err)
	}
	if _, err := files.Write(web); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%d charts in %s, %d of them changed\nwrote %s\n", len(charts), results, changed, filepath.Join(web, "index.html"))
	return err
}

func summary(name string, r reports.Run) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-12s %s (%s)\n", r.Result.Verdict, name, describe(r.Events))
	for _, f := range r.Result.Findings {
		fmt.Fprintf(&b, "%-12s %s\n", "", f)
	}
	return printable(b.String())
}

// printable replaces control characters of untrusted histories.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

func describe(events []history.Event) string {
	if len(events) == 0 || events[0].Run == nil {
		return "an unknown run"
	}
	return fmt.Sprintf("%s, fencing %s", events[0].Run.Scenario, events[0].Run.Fencing)
}

// A run that doesn't say how it was fenced counts as fenced.
func expected(r reports.Run) bool {
	switch r.Result.Verdict {
	case history.Safe:
		return true
	case history.Violated:
		run := r.Events[0].Run
		return run != nil && (run.Fencing == history.FencingOff || run.Fencing == history.FencingWrites)
	default:
		return false
	}
}
