package main

import (
	"bufio"
	"errors"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

var kills = flag.Int("kills", 4, "how often TestKillUnderLoad kills the resource")

func listen(t *testing.T) *net.TCPListener {
	t.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ln.Close()) })
	return ln
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

type child struct {
	*exec.Cmd
	wait func() error
}

// start runs the command on ln, under wrapper if any. The socket stays open here: no other process can take its port while the
// child is down, and clients can connect before it is up.
func start(t *testing.T, ln *net.TCPListener, wrapper []string, args ...string) *child {
	t.Helper()
	argv := slices.Concat(wrapper, []string{"resource", "-addr", "fd:3"}, args)
	c := &child{Cmd: exec.CommandContext(t.Context(), argv[0], argv[1:]...)}
	c.wait = sync.OnceValue(c.Wait)
	socket, err := ln.File()
	require.NoError(t, err)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	c.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	c.ExtraFiles = []*os.File{socket}
	c.Stderr = log
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	require.NoError(t, c.Start())
	require.NoError(t, socket.Close())
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // an error means that the group is gone
		_ = c.wait()
		if t.Failed() {
			t.Logf("the child's log:\n%s", c.log(t))
		}
		require.NoError(t, log.Close())
	})
	return c
}

func (c *child) log(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(c.Stderr.(*os.File).Name())
	require.NoError(t, err)
	return string(b)
}

// interrupt sends SIGTERM, and returns when the child has logged it.
func (c *child) interrupt(t *testing.T) {
	t.Helper()
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool { return strings.Contains(c.log(t), "shutting down") }, time.Minute, time.Millisecond)
}

func client(t *testing.T, ln net.Listener) *resource.Client {
	t.Helper()
	c, err := resource.NewClient("http://"+ln.Addr().String(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// A writer whose reply was lost repeats the write.
func TestKillUnderLoad(t *testing.T) {
	ln, file, ctx := listen(t), filepath.Join(t.TempDir(), "resource.db"), t.Context()
	c := client(t, ln)
	const writers, writesPerLife = 8, 100
	var accepted atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			key := "k" + strconv.Itoa(w)
			holds := func(tokens ...uint64) bool { // also true without an answer
				rec, err := c.Read(ctx, key)
				if errors.Is(err, resource.ErrNotFound) {
					err = nil
				}
				got := string(rec.Value) == strconv.FormatUint(rec.MaxFence.Token, 10) || rec.MaxFence == resource.Fence{}
				if err == nil && (!got || !slices.Contains(tokens, rec.MaxFence.Token)) {
					t.Errorf("%s: got %q at %v, want one of %v", key, rec.Value, rec.MaxFence, tokens)
					return false
				}
				return true
			}
			for token := uint64(1); !stop.Load(); {
				if !holds(token-1, token) {
					return
				}
				err := c.Write(ctx, key, at(token), []byte(strconv.FormatUint(token, 10)))
				stale, isStale := errors.AsType[*resource.StaleTokenError](err)
				switch {
				case err == nil, isStale && stale.Applied:
				case isStale:
					t.Errorf("%s: %v", key, err)
					return
				default:
					continue // the reply was lost; a repeat tells
				}
				if !holds(token) {
					return
				}
				token++
				accepted.Add(1)
			}
		})
	}
	defer func() {
		stop.Store(true)
		wg.Wait()
	}()
	progress := func() {
		enough := accepted.Load() + writesPerLife
		require.Eventually(t, func() bool { return accepted.Load() >= enough || t.Failed() }, 5*time.Minute, time.Millisecond)
	}
	for range *kills {
		life := start(t, ln, nil, "-file", file)
		progress()
		require.NoError(t, life.Process.Kill())
		require.Error(t, life.wait())
	}
	start(t, ln, nil, "-file", file)
	progress()
	t.Logf("%d kills, %d accepted writes", *kills, accepted.Load())
}

func TestGracefulStop(t *testing.T) {
	ln, file := listen(t), filepath.Join(t.TempDir(), "resource.db")
	c := start(t, ln, nil, "-file", file)
	conn := halfRequest(t, ln)
	c.interrupt(t)
	_, err := io.WriteString(conn, "v")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	require.NoError(t, c.wait())
	require.Contains(t, c.log(t), "terminated signal received")
}

// The request never ends.
func TestSecondSignalKills(t *testing.T) {
	ln := listen(t)
	c := start(t, ln, nil, "-store", "memory")
	halfRequest(t, ln)
	c.interrupt(t)
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.Error(t, c.wait())
	require.Equal(t, syscall.SIGTERM, c.ProcessState.Sys().(syscall.WaitStatus).Signal())
}

// halfRequest sends a write up to the last byte of its body, and returns once the server reads the body.
func halfRequest(t *testing.T, ln net.Listener) net.Conn {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", ln.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() }) // the server may have closed it already
	_, err = io.WriteString(conn, "PUT /r/k HTTP/1.1\r\nHost: h\r\nX-Fence-Token: 1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
	require.NoError(t, err)
	const goOn = "HTTP/1.1 100 Continue\r\n\r\n"
	got := make([]byte, len(goOn))
	_, err = io.ReadFull(conn, got)
	require.NoError(t, err)
	require.Equal(t, goOn, string(got))
	_, err = io.WriteString(conn, "v")
	require.NoError(t, err)
	return conn
}
