package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

func TestMain(m *testing.M) { testscript.Main(m, map[string]func(){"resource": main}) }

// TestScripts runs testdata/*.txtar, each in a folder with cert.pem and key.pem for 127.0.0.1.
func TestScripts(t *testing.T) {
	tls := httptest.NewUnstartedServer(nil)
	tls.EnableHTTP2 = true
	tls.StartTLS()
	client := tls.Client()
	tls.Close()
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			cert := tls.TLS.Certificates[0]
			key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
			require.NoError(t, err)
			for file, b := range map[string]*pem.Block{
				"cert.pem": {Type: "CERTIFICATE", Bytes: cert.Certificate[0]}, "key.pem": {Type: "PRIVATE KEY", Bytes: key},
			} {
				require.NoError(t, os.WriteFile(filepath.Join(e.WorkDir, file), pem.EncodeToMemory(b), 0o600))
			}
			e.Setenv("GORACE", "atexit_sleep_ms=0")
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			// serve [ARG...] runs a resource at $ADDR till the script's end. Its log is in the file log.
			"serve": func(ts *testscript.TestScript, _ bool, args []string) {
				cmd := exec.CommandContext(t.Context(), "resource", append([]string{"-addr", "127.0.0.1:0"}, args...)...)
				cmd.Dir = ts.MkAbs(".")
				log, err := os.Create(ts.MkAbs("log"))
				ts.Check(err)
				cmd.Stderr = log
				out, err := cmd.StdoutPipe()
				ts.Check(err)
				ts.Check(cmd.Start())
				ts.Defer(func() {
					_, _ = cmd.Process.Kill(), cmd.Wait()
					_ = log.Close()
				})
				line, err := bufio.NewReader(out).ReadString('\n')
				ts.Check(err)
				url := strings.TrimPrefix(strings.TrimSpace(line), "listening on ")
				ts.Setenv("URL", url)
				ts.Setenv("ADDR", url[strings.LastIndex(url, "/")+1:])
			},
			// http METHOD PATH [TOKEN [BODY]] prints the reply's status and body.
			"http": func(ts *testscript.TestScript, _ bool, args []string) {
				args = append(args, "", "")
				req, err := http.NewRequestWithContext(t.Context(), args[0], ts.Getenv("URL")+args[1], strings.NewReader(args[3]))
				ts.Check(err)
				if args[2] != "" {
					req.Header.Set("X-Fence-Token", args[2])
				}
				resp, err := client.Do(req)
				ts.Check(err)
				body, err := io.ReadAll(resp.Body)
				ts.Check(err)
				ts.Check(resp.Body.Close())
				_, err = fmt.Fprintf(ts.Stdout(), "%s %d %s", resp.Proto, resp.StatusCode, body)
				ts.Check(err)
			},
		},
	})
}

// A damaged record doesn't hide the fences of the others.
func TestListPastDamage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resource.db")
	s, err := boltstore.Open(file, nil)
	require.NoError(t, err)
	for i, key := range []string{"a", "b", "c"} {
		require.NoError(t, s.Write(t.Context(), key, resource.Fence{Token: uint64(i + 1), Seq: 1}, []byte("value of "+key)))
	}
	require.NoError(t, s.Close())
	all, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, bytes.ReplaceAll(all, []byte("value of b"), []byte("value of B")), 0o600))
	var out strings.Builder
	require.ErrorContains(t, run(t.Context(), []string{"-list", "-file", file}, &out), `the record of "b" is damaged`)
	require.Equal(t, "1\ta\n3\tc\n", out.String())

	ended, end := context.WithCancel(t.Context())
	end()
	err = run(ended, []string{"-list", "-file", file}, io.Discard)
	require.ErrorIs(t, err, context.Canceled, "it is not empty because it couldn't be read")
}
