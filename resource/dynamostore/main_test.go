package dynamostore_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/stretchr/testify/require"
	"github.com/truora/minidyn/server"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/internal/awstest"
)

// The tests run against a DynamoDB server in the process, or against the one of FENCELAB_DYNAMODB_ENDPOINT, with the
// credentials of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN and the region of AWS_REGION: an address,
// or "aws" for Amazon's. They make a table, and delete it.
var (
	endpoint  string
	table     = "fencelab-" + rand.Text()
	transport = awstest.Transport
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	if endpoint = os.Getenv("FENCELAB_DYNAMODB_ENDPOINT"); endpoint == "" {
		fake := httptest.NewServer(newFake())
		defer func() {
			fake.Close()
			code = cmp.Or(code, leaks())
		}()
		endpoint = fake.URL
	}
	defer transport.CloseIdleConnections()
	ctx := context.Background()
	c := newClient(transport)
	if err := dynamostore.CreateTable(ctx, c, table); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if _, err := c.DeleteTable(ctx, &dynamodb.DeleteTableInput{TableName: &table}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func leaks() int {
	if err := testmain.FindLeaks(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// newFake is the server in the process, with two things made good. It can't keep empty bytes, as DynamoDB does: they
// become other bytes. And it writes the items of its answers while other requests change them: they come one by one.
func newFake() http.Handler {
	const empty, instead = `{"B":""}`, `{"B":"ZW1wdHkgdmFsdWU="}`
	fake := server.NewServer()
	var mu sync.Mutex
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(bytes.ReplaceAll(body, []byte(empty), []byte(instead))))
		answer := httptest.NewRecorder()
		mu.Lock()
		fake.ServeHTTP(answer, r)
		mu.Unlock()
		maps.Copy(w.Header(), answer.Header())
		w.WriteHeader(answer.Code)
		_, _ = w.Write(bytes.ReplaceAll(answer.Body.Bytes(), []byte(instead), []byte(empty)))
	})
}

func newClient(rt http.RoundTripper, more ...func(*dynamodb.Options)) *dynamodb.Client {
	o := dynamodb.Options{
		Region: awstest.Region(), Credentials: awstest.Credentials(), Retryer: awstest.Retryer(),
		HTTPClient: &http.Client{Transport: rt},
	}
	if endpoint != "aws" {
		o.BaseEndpoint = &endpoint
	}
	return dynamodb.New(o, more...)
}

// once is a client that doesn't repeat requests.
func once(o *dynamodb.Options) { o.Retryer = aws.NopRetryer{} }

// open returns a Store on the table that the tests share, and the link that it uses.
func open(tb testing.TB, more ...func(*dynamodb.Options)) (*dynamostore.Store, *awstest.Link) {
	tb.Helper()
	l := &awstest.Link{}
	s, err := dynamostore.New(newClient(l, more...), table)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return s, l
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }
