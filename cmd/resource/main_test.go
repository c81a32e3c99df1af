package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

func listen(t *testing.T) *net.TCPListener {
	t.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ln.Close()) })
	return ln
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

func requireStale(t *testing.T, err error, seen resource.Fence, applied bool) {
	t.Helper()
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	require.True(t, ok, "got %v, want a *StaleTokenError", err)
	require.Equal(t, seen, stale.Seen)
	require.Equal(t, applied, stale.Applied)
}

func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return string(body)
}

// running returns the address of a command in this process. It ends with the test.
func running(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := run(ctx, args, w)
		done <- errors.Join(err, w.CloseWithError(err))
	}()
	line, err := bufio.NewReader(r).ReadString('\n')
	require.NoError(t, err)
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	require.True(t, ok, line)
	return url
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, pool := certificate(t, dir)
	url := running(t, "-addr", "127.0.0.1:0", "-store", "memory", "-tls-cert", certFile, "-tls-key", keyFile, "-log-level", "error")
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}
	c, err := resource.NewClient(url, &resource.ClientOptions{HTTPClient: &http.Client{Transport: transport}})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.Write(t.Context(), "a//b", at(5), []byte("v")))
	requireStale(t, c.Write(t.Context(), "a//b", at(4), nil), at(5), false)
}

// certificate is self-signed, for 127.0.0.1.
func certificate(t *testing.T, dir string) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	require.NoError(t, os.WriteFile(certFile, certPEM, 0o600))
	require.NoError(t, os.WriteFile(keyFile, keyPEM, 0o600))
	pool = x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(certPEM))
	return certFile, keyFile, pool
}

func TestRefusesToStart(t *testing.T) {
	ln := listen(t)
	garbage := filepath.Join(t.TempDir(), "notes.txt")
	require.NoError(t, os.WriteFile(garbage, []byte("remember the milk"), 0o600))
	free := []string{"-addr", "127.0.0.1:0"}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-addr", ln.Addr().String()}, "in use: stop what listens there, or choose another with -addr"},
		{[]string{"-addr", "nowhere"}, "can't listen on -addr nowhere"},
		{[]string{"-addr", "fd:2"}, "want the number of an inherited file descriptor"},
		{append(free, "-file", garbage), "notes.txt is damaged, or not a store's file"},
		{append(free, "-file", filepath.Dir(garbage)), "is a directory"},
		{append(free, "-fence", "maybe"), "want on or writes or off"},
		{append(free, "-store", "disk"), "want bolt or memory"},
		{append(free, "-max-body", "0"), "-max-body is 0; it must be from 1 to 67107840"},
		{append(free, "-max-body", "67107841"), "-max-body is 67107841; it must be from 1 to 67107840"},
		{append(free, "-tls-cert", "cert.pem"), "-tls-cert and -tls-key"},
		{append(free, "-no-such-flag"), "-h lists the flags"},
		{append(free, "serve"), `unexpected argument "serve"`},
	} {
		err := run(t.Context(), c.args, io.Discard)
		require.ErrorContains(t, err, c.want, "%v", c.args)
	}
}

// TestSetFence runs the help's example.
func TestSetFence(t *testing.T) {
	t.Chdir(t.TempDir())
	s, err := boltstore.Open("resource.db", nil)
	require.NoError(t, err)
	require.NoError(t, s.Write(t.Context(), "order-1", at(math.MaxUint64), []byte("v")))
	require.NoError(t, s.Close())
	line := regexp.MustCompile(`(?m)^  resource (-set-fence .*?) +#`).FindStringSubmatch(command.Examples)
	require.NotNil(t, line)
	var out strings.Builder
	require.NoError(t, run(t.Context(), strings.Fields(line[1]), &out))
	require.Equal(t, "the fence of \"order-1\" was 18446744073709551615 and is 7.0\n", out.String())
	s, err = boltstore.Open("resource.db", nil)
	require.NoError(t, err)
	require.NoError(t, s.Write(t.Context(), "order-1", at(7), []byte("w")))
	require.NoError(t, s.Close())
	for arg, want := range map[string]string{"order-2=7": "key not found", "order-1": "KEY=TOKEN", "order-1=x": "invalid syntax", "order-1=0": "token is 0"} {
		require.ErrorContains(t, run(t.Context(), []string{"-set-fence", arg}, io.Discard), want)
	}
	require.ErrorIs(t, run(t.Context(), []string{"-set-fence", "order-1=7", "-file", "other.db"}, io.Discard), os.ErrNotExist)
}

func TestHelp(t *testing.T) {
	var out strings.Builder
	require.ErrorIs(t, run(t.Context(), []string{"-h"}, &out), flag.ErrHelp)
	for _, name := range []string{"addr", "store", "file", "fence", "max-body", "max-unwritten", "max-jump", "set-fence", "token", "tls-cert", "tls-key", "log-level"} {
		env := "FENCELAB_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
		require.Regexp(t, fmt.Sprintf(`(?m)^  -%s \S+  \(%s`, name, env), out.String())
	}
	require.Contains(t, out.String(), "\nExamples:\n")
}
