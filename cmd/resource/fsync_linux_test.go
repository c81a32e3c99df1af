package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// strace returns a wrapper for start that logs writes, syncs and replies to file.
func strace(t *testing.T, file string) []string {
	t.Helper()
	testbed.Need(t, testbed.Program("strace", "sudo apt-get install strace"))
	// -I2: otherwise strace blocks signals, including what a killed test sends it with its own death.
	return []string{"strace", "-I2", "-f", "-y", "-e", "trace=write,pwrite64,fsync,fdatasync", "-o", file}
}

var (
	syncDone  = regexp.MustCompile(`^\d+ +(?:f(?:data)?sync\(\d+<.*resource\.db>\)|<\.\.\. f(?:data)?sync resumed>\)) += 0`)
	fileWrite = regexp.MustCompile(`(?m)^\d+ +pwrite64\(\d+<.*resource\.db>.*$`)
	answer    = regexp.MustCompile(`^\d+ +write\(\d+<.*>, "HTTP/1\.1 \d`)
)

// steps reads a trace: each "write" to the store's file and each "answer", from its start, and each "sync", from its end.
func steps(t *testing.T, file string) (out []string) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		switch {
		case fileWrite.MatchString(line):
			out = append(out, "write")
		case syncDone.MatchString(line):
			out = append(out, "sync")
		case answer.MatchString(line):
			out = append(out, "answer")
		}
	}
	return out
}

// strace passes the signal on.
func (c *child) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, syscall.Kill(-c.Process.Pid, syscall.SIGTERM))
	_ = c.wait()
}

// Refusals, plain reads and fenced reads that change nothing need no sync.
func TestAnswerLeavesAfterSync(t *testing.T) {
	ln, dir, ctx := listen(t), t.TempDir(), t.Context()
	trace := filepath.Join(dir, "trace")
	p := start(t, ln, strace(t, trace), "-file", filepath.Join(dir, "resource.db"))
	c := client(t, ln)
	read := func(token uint64) error {
		_, err := c.ReadFenced(ctx, "k", resource.Fence{Token: token})
		return err
	}
	calls := []struct {
		call  func() error
		syncs bool
		stale bool
	}{
		{call: func() error { return c.Write(ctx, "k", at(5), []byte("v")) }, syncs: true},
		{call: func() error { return c.Write(ctx, "k", at(4), []byte("v")) }, stale: true},
		{call: func() error { return read(7) }, syncs: true},
		{call: func() error { return read(7) }},
		{call: func() error { return read(6) }, stale: true},
		{call: func() error { return c.Write(ctx, "k", at(7), []byte("v")) }, syncs: true},
		{call: func() error { _, err := c.Read(ctx, "k"); return err }},
		{call: func() error { return c.Write(ctx, "l", at(1), make([]byte, 1<<20)) }, syncs: true},
	}
	for i, call := range calls {
		err := call.call()
		_, stale := errors.AsType[*resource.StaleTokenError](err)
		require.Equal(t, call.stale, stale, "call %d: %v", i, err)
		require.Equal(t, !call.stale, err == nil, "call %d: %v", i, err)
	}
	p.stop(t)

	i, syncs, dirty := 0, 0, false
	for _, s := range steps(t, trace) {
		switch s {
		case "write":
			dirty = true
		case "sync":
			syncs++
			dirty = false
		case "answer":
			require.False(t, dirty, "the answer to call %d left before what it rests on was synced", i)
			if i == 0 {
				syncs = min(syncs, 1) // opening the file syncs too
			}
			require.Equal(t, calls[i].syncs, syncs > 0, "call %d: %d syncs", i, syncs)
			i, syncs = i+1, 0
		}
	}
	require.Equal(t, len(calls), i, "answers in the trace")
}

// TestOpenSyncs: opening syncs a new file with its directory entry, and one whose last process may have been killed between write
// and sync.
func TestOpenSyncs(t *testing.T) {
	ln, dir := listen(t), t.TempDir()
	c := client(t, ln)
	for _, life := range []string{"first", "second"} {
		trace := filepath.Join(t.TempDir(), life)
		p := start(t, ln, strace(t, trace), "-file", filepath.Join(dir, "resource.db"))
		_, err := c.Read(t.Context(), "k")
		require.ErrorIs(t, err, resource.ErrNotFound)
		p.stop(t)
		all := steps(t, trace)
		require.Equal(t, "answer", all[len(all)-1])
		require.Contains(t, all, "sync", "%s life", life)
		b, err := os.ReadFile(trace)
		require.NoError(t, err)
		if life == "second" {
			require.Equal(t, []string{"write", "sync"}, all[:2], "what the disk lacks must be there before a page is written over")
			first := fmt.Sprintf(`pwrite64\(\d+<.*resource\.db>, .*, %d, 0\)`, 2*os.Getpagesize())
			require.Regexp(t, first, fileWrite.FindString(string(b)), "both meta pages, as they are")
		}
		require.Regexp(t, `fsync\(\d+<`+regexp.QuoteMeta(dir)+`>(\) += 0| <unfinished)`, string(b), "%s life: sync of the directory", life)
	}
}
