package etcdlock_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestTokenExpires(t *testing.T) {
	simple := []string{"--auth-token", "simple", "--auth-token-ttl", "1"}
	t.Run("simple", func(t *testing.T) { tokenExpires(t, false, simple...) })
	t.Run("simple, TLS", func(t *testing.T) { tokenExpires(t, true, simple...) })
	t.Run("jwt", func(t *testing.T) { tokenExpires(t, false, "--auth-token", jwt(t)) })
}

func tokenExpires(t *testing.T, secure bool, args ...string) {
	t.Helper()
	c := testmain.ServeCluster(t, testbed.StartEtcd, 1, &testbed.Options{
		Provider: testbed.Local, // can read a key file of this test
		Args:     append(args, "--bcrypt-cost", "4", "--election-timeout", "5000"),
	})
	enableAuth(t, c)
	login := func(cfg *clientv3.Config) {
		cfg.Username, cfg.Password = "root", "secret"
		if secure {
			cfg.Endpoints[0], cfg.TLS = behindTLS(t, cfg.Endpoints[0])
		}
	}
	holder, waiter := newNode(t, c, login), newNode(t, c, login)
	key := "test/" + uuid.NewString()
	g := holder.take(t, locktest.Next(key, time.Hour))
	_, first := waiter.waits(t, key, time.Hour) // its watch stays open, and so does the stream
	streamExpires(t, waiter.c)
	before := waiter.l.sent(opened)
	r := locktest.Request(time.Minute) // another session, with its own watch of messages
	r.Key = key
	second := locktest.Acquire(t.Context(), waiter, r)
	deadline := time.After(30 * time.Second)
	for waiter.l.sent(opened) < before+2 { // messages, and the key before its own
		select {
		case got := <-second:
			require.Fail(t, "the waiter is gone", "%v", got.Err)
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			require.Fail(t, "no watch was opened")
		}
	}
	require.NoError(t, holder.Release(t.Context(), g))
	locktest.Release(t, waiter, locktest.Won(t, first))
	got := locktest.Won(t, second)
	require.NoError(t, waiter.Renew(t.Context(), got))
	locktest.Release(t, waiter, got)
}

// A refused put must not be undone, which would be refused, too.
func TestNoPermission(t *testing.T) {
	c := testmain.ServeCluster(t, testbed.StartEtcd, 1, &testbed.Options{Args: []string{"--bcrypt-cost", "4"}})
	_, err := client(t, c, newLink()).UserAdd(t.Context(), "guest", "secret")
	require.NoError(t, err)
	enableAuth(t, c)
	n := newNode(t, c, func(cfg *clientv3.Config) { cfg.Username, cfg.Password = "guest", "secret" })
	r := locktest.Request(time.Hour)
	_, err = n.Acquire(t.Context(), r)
	require.ErrorIs(t, err, rpctypes.ErrPermissionDenied)
	require.ErrorIs(t, n.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}), dlock.ErrLost, "nothing was put")

	answered, deliver := n.l.holdAnswer() // the refusal comes after the undo has begun
	defer deliver()
	before := n.l.sent(txn)
	came := locktest.Acquire(t.Context(), n, locktest.Request(shortTTL))
	locktest.Receive(t, answered)
	locktest.Eventually(t, func() bool { return n.l.sent(txn) > before+1 })
	deliver()
	require.ErrorIs(t, locktest.Receive(t, came).Err, rpctypes.ErrPermissionDenied)
	locktest.Eventually(t, func() bool {
		var stacks strings.Builder
		require.NoError(t, pprof.Lookup("goroutine").WriteTo(&stacks, 2))
		return !strings.Contains(stacks.String(), "etcdlock.(*claim).expire(")
	}, "undone for ever")
}

// streamExpires returns when new watches are refused on a stream opened now. A request extends a simple token.
func streamExpires(t *testing.T, c *clientv3.Client) {
	t.Helper()
	probe := metadata.AppendToOutgoingContext(t.Context(), "stream", "probe")
	first := c.Watch(probe, "probe", clientv3.WithCreatedNotify()) // keeps it open
	opened := <-first
	require.NoError(t, opened.Err())
	for wait := 2 * time.Second; ; wait += time.Second {
		time.Sleep(wait)
		resp := <-c.Watch(probe, "probe", clientv3.WithCreatedNotify())
		if resp.Err() != nil {
			require.ErrorContains(t, resp.Err(), rpctypes.ErrorDesc(rpctypes.ErrInvalidAuthToken))
			return
		}
		require.Less(t, wait, 10*time.Second, "the token doesn't expire")
	}
}

func enableAuth(t *testing.T, c *testbed.Cluster) {
	t.Helper()
	cl := client(t, c, newLink())
	_, err := cl.UserAdd(t.Context(), "root", "secret")
	require.NoError(t, err)
	_, err = cl.UserGrantRole(t.Context(), "root", "root")
	require.NoError(t, err)
	_, err = cl.AuthEnable(t.Context())
	require.NoError(t, err)
}

// behindTLS puts a TLS proxy in front of a server.
func behindTLS(t *testing.T, upstream string) (string, *tls.Config) {
	t.Helper()
	web := httptest.NewTLSServer(nil)
	defer web.Close()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: web.TLS.Certificates, NextProtos: []string{"h2"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := new(net.Dialer).DialContext(t.Context(), "tcp", upstream)
			if err != nil {
				_ = from.Close()
				continue
			}
			pass := func(to, from net.Conn) {
				_, _ = io.Copy(to, from)
				_ = errors.Join(to.Close(), from.Close())
			}
			go pass(to, from)
			go pass(from, to)
		}
	}()
	return "https://" + l.Addr().String(), web.Client().Transport.(*http.Transport).TLSClientConfig
}

func jwt(t *testing.T) string {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte("any bytes will do for HS256"), 0o600))
	return fmt.Sprintf("jwt,sign-method=HS256,priv-key=%s,ttl=1s", key)
}
