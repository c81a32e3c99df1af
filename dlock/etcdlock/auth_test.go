package etcdlock_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// TestTokenExpires: etcd refuses a new watch on a stream that was opened with a token which has expired. Waiters must not
// fail by it, and must go on being told.
func TestTokenExpires(t *testing.T) {
	t.Run("simple", func(t *testing.T) { tokenExpires(t, 1, nil, "--auth-token", "simple", "--auth-token-ttl", "1") })
	t.Run("jwt", func(t *testing.T) { tokenExpires(t, 1, nil, "--auth-token", jwt(t)) })
	t.Run("TLS", func(t *testing.T) { tokenExpires(t, 3, throughTLS, "--auth-token", jwt(t)) })
}

func tokenExpires(t *testing.T, members int, through func(*testing.T, *clientv3.Config), args ...string) {
	t.Helper()
	c, err := testbed.StartEtcd(t.Context(), members, &testbed.Options{
		Provider: testbed.Local, // where it can read a key file of this test's
		Args:     append(args, "--bcrypt-cost", "4", "--election-timeout", "5000"),
	})
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	enableAuth(t, c)
	login := func(cfg *clientv3.Config) {
		cfg.Username, cfg.Password = "root", "secret"
		if through != nil {
			through(t, cfg)
		}
	}
	holder, waiter := newNode(t, c, login), newNode(t, c, login)
	if members > 1 {
		byLeader(t, holder, waiter) // whose connection has streams of its own
	}
	key := "test/" + uuid.NewString()
	g := holder.take(t, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: time.Hour})
	_, first := waiter.waits(t, key, time.Hour) // its watch stays open, and with it the stream
	streamExpires(t, waiter.c)
	opened := waiter.l.openedWatches()
	r := request(time.Minute) // another session, with another inbox
	r.Key = key
	second := make(chan outcome, 1)
	go func() {
		g, err := waiter.Acquire(t.Context(), r)
		second <- outcome{g, err, time.Now()}
	}()
	deadline := time.After(30 * time.Second)
	for waiter.l.openedWatches() < opened+2 { // its inbox, and the key before its own
		select {
		case got := <-second:
			require.Fail(t, "the waiter is gone", "%v", got.err)
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			require.Fail(t, "no watch was opened")
		}
	}
	require.NoError(t, holder.Release(t.Context(), g))
	got := receive(t, first)
	require.NoError(t, got.err)
	require.NoError(t, waiter.Release(t.Context(), got.g))
	got = receive(t, second)
	require.NoError(t, got.err)
	require.NoError(t, waiter.Renew(t.Context(), got.g))
	require.NoError(t, waiter.Release(t.Context(), got.g))
}

// streamExpires returns when new watches are refused on a stream that is opened now. Asking makes a simple token last
// longer, so it asks ever less often.
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

// jwt is the flag's value for tokens that last for a second.
func jwt(t *testing.T) string {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte("any bytes will do for HS256"), 0o600))
	return fmt.Sprintf("jwt,sign-method=HS256,priv-key=%s,ttl=1s", key)
}

// throughTLS has a client speak TLS with a proxy before each member.
func throughTLS(t *testing.T, cfg *clientv3.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	server := &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13,
	}
	for i, addr := range cfg.Endpoints {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		require.NoError(t, err)
		forward(t, tls.NewListener(l, server), addr)
		cfg.Endpoints[i] = "https://" + l.Addr().String()
	}
	cfg.TLS = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}
}

// forward passes on what l accepts, until the test ends.
func forward(t *testing.T, l net.Listener, addr string) {
	t.Helper()
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
			if err != nil {
				_ = in.Close()
				continue
			}
			for _, p := range [][2]net.Conn{{in, out}, {out, in}} {
				conns.Go(func() {
					_, _ = io.Copy(p[0], p[1])
					_, _ = p[0].Close(), p[1].Close()
				})
			}
		}
	})
	t.Cleanup(func() { // after the clients, whose connections end with them
		_ = l.Close()
		conns.Wait()
	})
}
