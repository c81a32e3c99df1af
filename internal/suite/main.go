// Command suite runs go test with its arguments and ends with a table of servers used and tests not run. If FENCELAB_RAN names a
// file, it appends the tests that ran or were skipped.
//
//	suite ARGUMENTS-OF-GO-TEST
//	suite -never FILE          fails if a test was skipped in every run recorded in FILE
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	run := test
	if len(os.Args) == 3 && os.Args[1] == "-never" {
		run = never
	}
	if err := run(os.Args[1:], os.Stdout); err != nil {
		if failed, ok := errors.AsType[*exec.ExitError](err); ok {
			os.Exit(max(1, failed.ExitCode()))
		}
		fmt.Fprintln(os.Stderr, "suite:", err)
		os.Exit(1)
	}
}

const envRan = "FENCELAB_RAN"

const envStarted = "FENCELAB_STARTED"

type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

func test(args []string, out io.Writer) error {
	dir, err := os.MkdirTemp("", "fencelab-suite")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	started := filepath.Join(dir, "started")
	if err := os.WriteFile(started, nil, 0o600); err != nil {
		return err
	}
	// Tests mostly wait for servers.
	packages := strconv.Itoa(max(4, runtime.GOMAXPROCS(0)))
	cmd := exec.Command("go", append([]string{"test", "-json", "-p", packages}, args...)...) //nolint:noctx // signals end it, see below
	cmd.Env = append(os.Environ(), envStarted+"="+started)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	// On an interrupt go waits for its tests; other signals kill it without them.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		for sig := range ended {
			if sig != syscall.SIGQUIT { // SIGQUIT shows what the tests are doing
				sig = syscall.SIGINT
			}
			_ = syscall.Kill(-cmd.Process.Pid, sig.(syscall.Signal))
		}
	}()
	s := &summary{output: map[string][]string{}, skips: map[string]map[string]int{}}
	readErr := s.read(stdout, out)
	err = cmd.Wait()
	if readErr != nil {
		return errors.Join(readErr, err)
	}
	text, startedErr := os.ReadFile(started)
	s.table(out, string(text))
	if path := os.Getenv(envRan); path != "" {
		return errors.Join(err, startedErr, appendTo(path, s.ran))
	}
	return errors.Join(err, startedErr)
}

type summary struct {
	output   map[string][]string       // of tests that have not ended, and of their packages
	packages []string                  // tested, in the order of their end
	skips    map[string]map[string]int // number of tests by package and reason
	ran      []string                  // "ran" or "skipped", a package and a test
}

func (s *summary) read(in io.Reader, out io.Writer) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				e = event{Action: "build-output", Output: line}
			}
			s.handle(e, out)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) handle(e event, out io.Writer) {
	id := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		_, _ = io.WriteString(out, e.Output)
	case "output":
		s.output[id] = append(s.output[id], e.Output)
	case "pass", "fail", "skip":
		text := strings.Join(s.output[id], "")
		delete(s.output, id)
		switch {
		case e.Test == "":
			s.packages = append(s.packages, e.Package)
			s.end(e, text, out)
		case e.Action == "fail":
			_, _ = io.WriteString(out, text)
			s.ran = append(s.ran, "ran "+id)
		case e.Action == "skip":
			if why := reason(text); !byDesign(why) {
				s.skip(e.Package, why)
				s.ran = append(s.ran, "skipped "+id)
			}
		default:
			s.ran = append(s.ran, "ran "+id)
		}
	}
}

// noTests starts a package's message that it ran no tests; see package testmain.
const noTests = "no tests were run: "

// end prints a package's last line, or, if it failed, its whole output and that of unfinished tests.
func (s *summary) end(e event, text string, out io.Writer) {
	none := false
	for line := range strings.Lines(text) {
		if why, ok := strings.CutPrefix(line, noTests); ok {
			none = true
			s.skip(e.Package, "all tests: "+strings.TrimSpace(why))
		}
		if none && strings.HasPrefix(line, "ok ") {
			line = "did not run" + strings.TrimPrefix(line, "ok  ")
		}
		last := strings.HasPrefix(line, "ok ") || strings.HasPrefix(line, "did not run\t") || strings.HasPrefix(line, "?") || strings.HasPrefix(line, "FAIL\t")
		if e.Action == "fail" || last && !strings.Contains(line, "[no test files]") {
			_, _ = io.WriteString(out, line)
		}
	}
	if e.Action != "fail" {
		return
	}
	var cut []string
	for id := range s.output {
		if strings.HasPrefix(id, e.Package+" ") {
			cut = append(cut, id)
		}
	}
	for _, id := range slices.Sorted(slices.Values(cut)) {
		_, _ = io.WriteString(out, strings.Join(s.output[id], ""))
		delete(s.output, id)
	}
}

func (s *summary) skip(pkg, why string) {
	if s.skips[pkg] == nil {
		s.skips[pkg] = map[string]int{}
	}
	s.skips[pkg][why]++
}

func reason(text string) string {
	for line := range strings.Lines(text) {
		if file, why, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && strings.Contains(file, ".go:") {
			return why
		}
	}
	return "no reason given"
}

// byDesign reports whether a skip isn't for lack of a server.
func byDesign(why string) bool {
	return strings.HasPrefix(why, "not applicable") || strings.Contains(why, " is nil: ")
}

func (s *summary) table(out io.Writer, started string) {
	servers := map[string][]string{}
	for line := range strings.Lines(started) {
		dir, server, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		servers[dir] = append(servers[dir], server)
	}
	wd, _ := os.Getwd()
	_, _ = fmt.Fprintf(out, "\n%-24s %s\n", "package", "ran on; − did not run")
	for _, pkg := range slices.Sorted(slices.Values(s.packages)) {
		name := strings.TrimPrefix(pkg, "github.com/fencelab/fencelab/")
		on := servers[filepath.Join(wd, name)]
		if on == nil && s.skips[pkg] == nil {
			continue
		}
		slices.Sort(on)
		row := cmp.Or(strings.Join(slices.Compact(on), ", "), "no server")
		_, _ = fmt.Fprintf(out, "%-24s %s\n", name, row)
		for _, why := range slices.Sorted(maps.Keys(s.skips[pkg])) {
			tests := fmt.Sprintf("%d tests: ", s.skips[pkg][why])
			if strings.HasPrefix(why, "all tests") {
				tests = ""
			}
			_, _ = fmt.Fprintf(out, "%-24s − %s%s\n", "", tests, why)
		}
	}
	if n := len(s.ran); n > 0 {
		skipped := 0
		for _, line := range s.ran {
			if strings.HasPrefix(line, "skipped ") {
				skipped++
			}
		}
		_, _ = fmt.Fprintf(out, "%d tests ran, %d did not\n", n-skipped, skipped)
	}
}

func appendTo(path string, lines []string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, strings.Join(lines, "\n")+"\n")
	return errors.Join(err, f.Close())
}

func never(args []string, out io.Writer) error {
	text, err := os.ReadFile(args[1])
	if err != nil {
		return err
	}
	ran, skipped := map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(string(text)) {
		outcome, id, _ := strings.Cut(strings.TrimSpace(line), " ")
		if outcome == "ran" {
			ran[id] = true
		} else if id != "" {
			skipped[id] = true
		}
	}
	var none []string
	for id := range skipped {
		if !ran[id] {
			none = append(none, id)
		}
	}
	if len(ran) == 0 || len(none) > 0 {
		slices.Sort(none)
		return fmt.Errorf("%d tests ran; these were skipped in every run:\n  %s", len(ran), strings.Join(none, "\n  "))
	}
	_, err = fmt.Fprintf(out, "%d tests ran, each in at least one run\n", len(ran))
	return err
}
