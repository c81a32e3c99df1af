package main

import (
	"bufio"
	"bytes"
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

// asMain makes the test binary the command itself.
const asMain = "RESOURCE_TEST_MAIN"

var kills = flag.Int("kills", 4, "how often TestKillUnderLoad kills the resource")

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child has a process group of its own, with its wrapper.
type child struct {
	*exec.Cmd
	stderr *logBuffer
	exited chan struct{}
	err    error // of Wait, valid once exited is closed
}

// start runs the command on ln, under wrapper if any. The socket stays open here: no other process can take its port
// while the child is down, and clients can connect before it is up.
func start(t *testing.T, ln *net.TCPListener, wrapper []string, args ...string) *child {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	argv := append(append([]string{}, wrapper...), exe, "-addr", "fd:3")
	argv = append(argv, args...)
	c := &child{Cmd: exec.CommandContext(t.Context(), argv[0], argv[1:]...), stderr: &logBuffer{}, exited: make(chan struct{})}
	socket, err := ln.File()
	require.NoError(t, err)
	c.Env = append(os.Environ(), asMain+"=1", "GORACE=atexit_sleep_ms=0")
	c.ExtraFiles = []*os.File{socket}
	c.Stderr = c.stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	require.NoError(t, c.Start())
	require.NoError(t, socket.Close())
	go func() {
		c.err = c.Wait()
		close(c.exited)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // an error means that all of it is gone
		<-c.exited
		if t.Failed() {
			t.Logf("the child's log:\n%s", c.stderr)
		}
	})
	return c
}

func (c *child) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	require.NoError(t, c.Process.Signal(sig))
}

type logBuffer struct {
	mu      sync.Mutex
	buf     bytes.Buffer
	changed chan struct{}
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *logBuffer) waitFor(t *testing.T, s string) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		b.mu.Lock()
		if strings.Contains(b.buf.String(), s) {
			b.mu.Unlock()
			return
		}
		if b.changed == nil {
			b.changed = make(chan struct{})
		}
		changed := b.changed
		b.mu.Unlock()
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("the log never says %q:\n%s", s, b)
		}
	}
}

func client(t *testing.T, ln net.Listener) *resource.Client {
	t.Helper()
	c, err := resource.NewClient("http://"+ln.Addr().String(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// TestKillUnderLoad kills the resource while eight writers count up. Accepted writes survive; a writer whose reply was
// lost repeats the write, and learns whether it was applied.
func TestKillUnderLoad(t *testing.T) {
	ln, file, ctx := listen(t), filepath.Join(t.TempDir(), "resource.db"), t.Context()
	c := client(t, ln)
	const writers, writesPerLife = 8, 100
	var accepted atomic.Int64
	reached := make(chan struct{}, 1)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			key := "k" + strconv.Itoa(w)
			holds := func(tokens ...uint64) bool { // true also if there is no answer
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
			for token := uint64(1); ; {
				select {
				case <-stop:
					return
				default:
				}
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
					continue // the answer was lost; a repeat tells
				}
				if !holds(token) {
					return
				}
				token++
				if accepted.Add(1)%writesPerLife == 0 {
					select {
					case reached <- struct{}{}:
					default:
					}
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	progress := func() {
		select {
		case <-reached:
		case <-done: // each has failed
		}
	}
	for range *kills {
		life := start(t, ln, nil, "-file", file)
		progress()
		life.signal(t, syscall.SIGKILL)
		<-life.exited
	}
	start(t, ln, nil, "-file", file)
	progress()
	close(stop)
	<-done
	t.Logf("%d kills, %d accepted writes", *kills, accepted.Load())
}

// TestGracefulStop sends SIGTERM during a request, which finishes.
func TestGracefulStop(t *testing.T) {
	ln, file := listen(t), filepath.Join(t.TempDir(), "resource.db")
	c := start(t, ln, nil, "-file", file)
	conn := halfRequest(t, ln)
	c.signal(t, syscall.SIGTERM)
	c.stderr.waitFor(t, "shutting down")
	_, err := io.WriteString(conn, "v")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	<-c.exited
	require.NoError(t, c.err)
	require.Contains(t, c.stderr.String(), "terminated signal received")
}

// TestSecondSignalKills has a request that never ends.
func TestSecondSignalKills(t *testing.T) {
	ln := listen(t)
	c := start(t, ln, nil, "-store", "memory")
	halfRequest(t, ln)
	c.signal(t, syscall.SIGTERM)
	c.stderr.waitFor(t, "shutting down")
	c.signal(t, syscall.SIGTERM)
	<-c.exited
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

func TestWarnings(t *testing.T) {
	for _, c := range []struct {
		ip   string
		args []string
		want string // part of the log; empty: no warning
	}{
		{"127.0.0.1", nil, ""},
		{"127.0.0.1", []string{"-fence", "writes"}, ""},
		{"127.0.0.1", []string{"-fence", "off"}, "FENCING IS OFF"},
		{"0.0.0.0", nil, "anyone who reaches this address may write"},
		{"0.0.0.0", []string{"-token", "secret"}, ""},
	} {
		ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.ParseIP(c.ip)})
		require.NoError(t, err)
		p := start(t, ln, nil, append(c.args, "-store", "memory")...)
		require.Equal(t, "ok\n", get(t, "http://"+ln.Addr().String()+"/healthz"))
		p.signal(t, syscall.SIGTERM)
		<-p.exited
		require.NoError(t, p.err)
		require.NoError(t, ln.Close())
		if c.want == "" {
			require.NotContains(t, p.stderr.String(), "level=WARN")
		} else {
			require.Contains(t, p.stderr.String(), c.want)
		}
	}
}

// TestUnfenced: a late write destroys a newer one.
func TestUnfenced(t *testing.T) {
	ln, ctx := listen(t), t.Context()
	start(t, ln, nil, "-store", "memory", "-fence", "off")
	c, err := resource.NewClient("http://"+ln.Addr().String(), &resource.ClientOptions{AllowUnfenced: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.Write(ctx, "k", at(2), []byte("successor")))
	require.NoError(t, c.Write(ctx, "k", at(1), []byte("late")))
	rec, err := c.Read(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("late"), MaxFence: at(2)}, rec)
}

func TestMetrics(t *testing.T) {
	ln, ctx := listen(t), t.Context()
	start(t, ln, nil, "-store", "memory", "-token", "secret")
	c, err := resource.NewClient("http://"+ln.Addr().String(), &resource.ClientOptions{Token: "secret"})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.Write(ctx, "k", at(2), nil))
	require.Error(t, c.Write(ctx, "k", at(1), nil))
	page := get(t, "http://"+ln.Addr().String()+"/metrics")
	require.Contains(t, page, "\nresource_stale_token_rejections_total 1\n")
	require.Contains(t, page, "\nprocess_start_time_seconds ")
}
