package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestMain(m *testing.M) {
	testscript.Main(checked{m}, map[string]func(){"fencelab": main})
}

type checked struct{ m *testing.M }

func (c checked) Run() int {
	for _, s := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} { // by nohup, or a shell's &; the scripts would inherit it
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	return testmain.Code(c.m)
}

const patience = time.Minute

// TestScripts runs testdata/*.txtar, each with its own Redis at $REDIS and, through a link, at $LOCK.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		Condition: func(cond string) (bool, error) {
			if cond != "root" {
				return false, fmt.Errorf("unknown condition %q", cond)
			}
			return os.Getuid() == 0, nil
		},
		Setup: func(e *testscript.Env) error {
			s := testmain.Serve(e.T().(testing.TB), testbed.StartRedis, &testbed.Options{AllowEmbedded: true})
			link, err := faults.NewLink(s.Addr)
			if err != nil {
				return err
			}
			e.Defer(func() { require.NoError(t, link.Close()) })
			e.Values["link"], e.Values["redis"] = link, s.Addr
			e.Setenv("REDIS", "redis://"+s.Addr)
			e.Setenv("LOCK", "redis://"+link.Addr())
			silent, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0") // the kernel accepts connections
			if err != nil {
				return err
			}
			e.Defer(func() { require.NoError(t, silent.Close()) })
			e.Values["silent"] = silent
			e.Setenv("SILENT", silent.Addr().String())
			e.Setenv("GORACE", "atexit_sleep_ms=0")
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			// redis COMMAND [ARG...] runs a command of Redis until its reply is not 0, or with ! until it is.
			"redis": func(ts *testscript.TestScript, neg bool, args []string) {
				c, err := redisclient.New(ts.Value("redis").(string))
				ts.Check(err)
				defer func() { _ = c.Close() }()
				var words []any
				for _, w := range args {
					words = append(words, w)
				}
				await(ts, fmt.Sprintf("redis %q", args), func() bool {
					reply, err := c.Do(context.Background(), words...).Result()
					ts.Check(err)
					return (reply == int64(0)) == neg
				})
			},
			"cut": func(ts *testscript.TestScript, _ bool, _ []string) {
				heal, err := ts.Value("link").(*faults.Link).Cut(context.Background())
				ts.Check(err)
				ts.Defer(func() { _ = heal(context.Background()) })
			},
			"accept": func(ts *testscript.TestScript, _ bool, _ []string) {
				c, err := ts.Value("silent").(net.Listener).Accept()
				ts.Check(err)
				ts.Defer(func() { _ = c.Close() })
			},
			// await FILE waits until the file is complete.
			"await": func(ts *testscript.TestScript, _ bool, args []string) {
				await(ts, args[0], func() bool {
					b, err := os.ReadFile(ts.MkAbs(args[0]))
					return err == nil && bytes.HasSuffix(b, []byte("\n"))
				})
			},
			// signal NAME FILE signals the process whose pid is in FILE.
			"signal": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Check(syscall.Kill(pid(ts, args[1]), unix.SignalNum("SIG"+args[0])))
			},
			// gone FILE waits until that process has ended.
			"gone": func(ts *testscript.TestScript, _ bool, args []string) {
				n := pid(ts, args[0])
				await(ts, fmt.Sprintf("the end of %d (%s)", n, args[0]), func() bool {
					if errors.Is(syscall.Kill(n, 0), syscall.ESRCH) {
						return true
					}
					stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n))
					return runtime.GOOS == "linux" && strings.Contains(string(stat), ") Z ")
				})
			},
		},
	})
}

func pid(ts *testscript.TestScript, file string) int {
	n, err := strconv.Atoi(strings.TrimSpace(ts.ReadFile(file)))
	ts.Check(err)
	return n
}

func await(ts *testscript.TestScript, what string, ok func() bool) {
	for began := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			ts.Fatalf("waited for %s in vain", what)
		}
	}
}
